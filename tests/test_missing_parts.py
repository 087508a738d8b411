"""Parts of Determined that are not here: the same words at run time, from ``port`` and in the documentation."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from det_lightning.errors import UnsupportedPart
from det_lightning.parts_of_determined import MISSING_PARTS, find_topic, missing_part
from det_lightning.porting.python_files import port_python
from tests.launching import ROOT

#: What is imported from the module that has it in Determined, each below ``determined``.
PARTS = """
    keras experimental.client pytorch.dsat errors.WorkerFinishedGracefully searcher LegacyTrial core.run_prepare
    util.write_user_code horovod.create_run_command tensorboard.TensorboardManager NativeContext Categorical
    experimental.create pytorch.PyTorchTrialController launch.horovod.create_sshd_worker_cmd
    launch.torch_distributed.create_log_redirect_cmd launch.wrap_rank.forward_stream
"""
IMPORTS = {
    **{re.sub(r"(.*)\.", r"from \1 import ", f"determined.{part}"): f"determined.{part}" for part in PARTS.split()},
    "import determined.keras": "determined.keras",
    "from determined.keras import TFKerasTrial": "determined.keras",
    "from determined.experimental.client import create_experiment": "determined.experimental.client",
    "from determined.common import check": "determined.common",
    "from determined._trial_controller import TrialController": "determined._trial_controller",
    "from determined.pytorch.deepspeed import DeepSpeedTrial": "determined.pytorch.deepspeed",
    "from determined.pytorch.lightning import LightningAdapter": "determined.pytorch.lightning",
    "from determined.pytorch._lightning import PLAdapter": "determined.pytorch._lightning",
    "from determined.experimental.pytorch_lightning import PTLAdapter": "determined.experimental.pytorch_lightning",
    "from determined.callback import Callback": "determined.callback",
    "from determined.launch.deepspeed import create_run_command": "determined.launch.deepspeed",
}
USES = {
    "det.keras.callbacks": "determined.keras",
    "det.experimental.client.login()": "determined.experimental.client",
    "det.pytorch.deepspeed.DeepSpeedTrial": "determined.pytorch.deepspeed",
    "det.core.run_prepare()": "determined.core.run_prepare",
    "det.errors.CheckpointStateException": "determined.errors.CheckpointStateException",
    "det.util.json_encode({})": "determined.util.json_encode",
    "det.tensorboard.build": "determined.tensorboard.build",
    "det.create(trial_def=None)": "determined.create",
}

RUN = """
import json, sys
if sys.argv[1] == "determined":
    from det_lightning import compat
    compat.install()
raised = []
for line in json.loads(sys.argv[2]):
    try:
        exec(line)
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        raised.append([line, str(error), "UnsupportedPart" in kinds, isinstance(error, ModuleNotFoundError)])
print(json.dumps(raised))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["determined", "det_lightning"])
def test_missing_parts_raise_errors(name: str) -> None:
    parts = {**IMPORTS, **{f"import determined as det; {use}": path for use, path in USES.items()}}
    if name == "determined":  # of ours, this is the command line, and a name that nobody knows stays one
        parts |= {"import determined.cli.cli": "determined.cli", "import determined.foo": "determined.foo"}
    lines = {line.replace("determined", name): path for line, path in parts.items()}
    arguments = [sys.executable, "-c", RUN, name, json.dumps(list(lines))]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        [line, str(missing_part(path)), True, "as det" not in line] for line, path in lines.items()
    ]


@pytest.mark.parametrize(("line", "path"), IMPORTS.items())
def test_port_says_the_same(line: str, path: str) -> None:
    _, (finding,) = port_python(f"{line}\n")
    reason, advice = MISSING_PARTS[find_topic(path)]
    assert finding.reason.startswith(path)
    assert finding.reason.endswith(f": {reason}")
    assert finding.advice == advice


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("determined.pytorch.dsat.dsat_reporting_context", "DeepSpeed Autotune"),
        ("determined.common.set_logger", "logging.basicConfig"),
        ("determined.common.experimental.ModelVersion", "keep scripts that need the master (api, experimental) apart"),
    ],
)
def test_what_is_said_is_about_the_part_itself(path: str, said: str) -> None:
    assert said in str(missing_part(path))


def test_missing_attributes_raise_the_usual_error_or_advice() -> None:
    det = importlib.import_module("det_lightning")
    assert not hasattr(det, "keras")
    with pytest.raises(UnsupportedPart, match=r"^determined\.keras: it is for TensorFlow and Keras\. What to do: "):
        det.keras  # noqa: B018 (looking it up is the test)
    with pytest.raises(ModuleNotFoundError, match=r"No module named .det_lightning\.no_such_name"):
        importlib.import_module("det_lightning.no_such_name")
    with pytest.raises(ImportError, match="cannot import name 'NoSuchName'"):
        exec("from det_lightning.pytorch import NoSuchName")


def test_docs_list_what_is_out() -> None:
    listed = re.findall(r"`(determined[\w.]*)`", Path(ROOT / "docs" / "missing.md").read_text())
    public = [path for path in MISSING_PARTS if "._" not in path and path != "determined"]
    assert [path for path in public if not any(f"{path}.".startswith(f"{name}.") for name in listed)] == []
