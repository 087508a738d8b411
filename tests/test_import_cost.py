"""What an import brings along. Lightning and torch are slow to import, and not everything needs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from det_lightning.checkpoint import CheckpointStorage
from tests.checkpoint.made_checkpoints import make_files
from tests.cli.exported import describe_trial

# Most tests start a Python of their own.
pytestmark = pytest.mark.slow

LIGHTNING = ["lightning_fabric", "pytorch_lightning"]
HEAVY = [*LIGHTNING, "numpy", "tensorboard", "torch", "torchmetrics"]
OF_CONFIGURATIONS = ["pydantic", "ruamel.yaml", "det_lightning.config"]


def import_in_turn(*modules: str) -> dict[str, set[str]]:
    """Import modules one after the other in a process of their own; return all that is imported after each."""
    code = f"import importlib, sys\nfor name in {modules}:\n    importlib.import_module(name)\n    print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {module: set(line.split()) for module, line in zip(modules, done.stdout.splitlines(), strict=True)}


def test_import_brings_only_what_it_needs() -> None:
    without = {
        "det_lightning": [*HEAVY, *OF_CONFIGURATIONS],
        "det_lightning.errors": HEAVY,
        "det_lightning.units": HEAVY,
        "det_lightning.core": HEAVY,
        "det_lightning.porting": [*HEAVY, "libcst"],
        "det_lightning.testing.plugin": [*HEAVY, "jinja2", "yaml", "det_lightning.pytorch"],
        "det_lightning.cli": [*HEAVY, *OF_CONFIGURATIONS, "fsspec"],
        "det_lightning.checkpoint": [*LIGHTNING, "tensorboard", "torchmetrics", "det_lightning.pytorch"],
        "det_lightning.pytorch": [
            *LIGHTNING,
            *OF_CONFIGURATIONS,
            "sympy",
            "tensorboard",
            "torch.distributed.tensor",
            "torchmetrics",
        ],
        "det_lightning.pytorch._trainer": ["tensorboard", "boto3"],
    }
    for module, imported in import_in_turn(*without).items():
        assert module in imported
        assert imported & {*without[module]} == set(), module


def test_configurations_need_little_else() -> None:
    before, config, lifecycle = import_in_turn(
        "det_lightning", "det_lightning.config", "det_lightning.experiments.lifecycle"
    ).values()
    assert {name for name in config - before if name.startswith("det_lightning.") and ".config" not in name} == {
        "det_lightning.checkpoint",
        "det_lightning.checkpoint.storage",
        "det_lightning.checkpoint.storage.storage_config",
        "det_lightning.hyperparameters",
        "det_lightning.units",
    }
    assert config & {*HEAVY} == lifecycle & {"ray", "det_lightning.experiments.ray_cluster"} == set()


def test_garbage_collector_rests_while_lightning_is_imported() -> None:
    code = (
        "import gc, sys, det_lightning as det; det.pytorch.PyTorchTrial\n"
        "collections = []; gc.callbacks.append(lambda phase, _: collections.append(phase))\n"
        "assert 'pytorch_lightning' not in sys.modules\n"
        "det.pytorch.Trainer\n"
        "assert 'pytorch_lightning' in sys.modules and gc.isenabled()\n"
        "print(len(collections))"  # an import of Lightning makes hundreds
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10


# What only a checkpoint, a resume, a configuration, a search or a command needs.
NOT_YET = ["checkpoint.safe_load.reading", "config", "experiments", "testing", "cli"]


@pytest.mark.parametrize(
    ("api", "further"),
    [("determined", {"fastcrc", "filelock", "pathspec", "platformdirs"}), ("lightning", {"fastcrc", "pathspec"})],
)
def test_first_batch_imports_hardly_more(api: str, further: set[str]) -> None:
    script = Path(__file__).with_name("first_batch.py")
    done = subprocess.run([sys.executable, script, api], capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if "det_lightning.engine.run " in line)
    imported = set(line.split())
    packages = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names)
    assert packages - {"det_lightning"} == further
    assert imported.isdisjoint(f"det_lightning.{name}" for name in NOT_YET)


#: Runs commands of ``det-lightning checkpoint`` one after the other, and prints what is imported after each.
COMMANDS = """
import json, sys
from det_lightning.cli import main
for command in json.loads(sys.argv[1]):
    sys.argv = ["det-lightning", "checkpoint", *command]
    try:
        main()
    except SystemExit as end:
        print()
        print("modules", bool(end.code), *sys.modules)
"""


def test_command_without_weights_needs_no_torch(tmp_path: Path) -> None:
    """A file of Determined's master names the first of two checkpoints in a storage."""
    checkpoints = str(tmp_path / "checkpoints")
    for checkpoint_id, steps in (("first", 3), ("second", 5)):
        CheckpointStorage(checkpoints).write(make_files(steps), checkpoint_id, code=tmp_path)
    (tmp_path / "trial.json").write_text(json.dumps(describe_trial(7, {"first": (3, 0.5)})))
    reading = [["ls", checkpoints], ["show", "missing"], ["verify", "missing"]]
    writing = [
        ["annotate", checkpoints, str(tmp_path / "trial.json")],
        ["prune", checkpoints, "--dry-run"],
        ["prune", checkpoints, "--trial-best", "0", "--trial-latest", "1"],
        *[["export", "missing"], ["merge", "missing"], ["import", "missing", checkpoints]],
    ]
    run = [sys.executable, "-c", COMMANDS, json.dumps(reading + writing)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    ends = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("modules ")]
    for command, (has_failed, *imported) in zip(reading + writing, ends, strict=True):
        assert has_failed == str("missing" in command), command
        assert f"det_lightning.cli.checkpoint_{'writing' if command in writing else 'reading'}" in imported, command
        assert {*imported} & {*HEAVY, "boto3"} == set(), command
