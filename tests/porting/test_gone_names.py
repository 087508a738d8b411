"""Names that today's libraries no longer have: what is renamed, and what is a problem."""

from __future__ import annotations

import re
import textwrap
from importlib.metadata import requires
from pathlib import Path

import numpy
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from det_lightning.porting import FilePort, Severity, port_project
from det_lightning.porting.findings import Finding
from det_lightning.porting.gone_names import port_json, port_options
from det_lightning.porting.gone_table import read_table
from det_lightning.porting.libraries import Libraries
from det_lightning.porting.library_survey import read_libraries
from det_lightning.porting.python_files import port_python

# The names depend on the releases that are installed.
pytestmark = pytest.mark.skipif(Version(numpy.__version__) < Version("2.4"), reason="numpy is of before 2.4")

#: Of a project that uses transformers, in whatever release is newest.
WITH_TRANSFORMERS = Libraries(imported=frozenset({"transformers"}), takes_options=True)
IMPORTS = """
import collections, inspect, pandas, time, torch, yaml, datasets, transformers
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from PIL import Image
from torch.optim import lr_scheduler
from transformers import AutoTokenizer, Seq2SeqTrainer, Trainer, TrainingArguments
"""


def port(text: str, libraries: Libraries = WITH_TRANSFORMERS) -> tuple[str, list[Finding]]:
    """Port Python below the imports; once more changes nothing."""
    after, findings = port_python(IMPORTS + text, libraries)
    assert port_python(after, libraries)[0] == after
    return after.removeprefix(IMPORTS), findings


def reasons(text: str, libraries: Libraries = WITH_TRANSFORMERS) -> list[str]:
    return [found.reason for found in port(text, libraries)[1] if found.severity is Severity.problem]


RENAMED = {
    "np.zeros(3, dtype=np.float)": "np.zeros(3, dtype=float)",
    "x = np.int(np.product([1.0]))": "x = int(np.prod([1.0]))",
    "np.Inf, np.NaN": "np.inf, np.nan",
    "np.percentile(x, 5, interpolation='lower')": "np.percentile(x, 5, method='lower')",
    "image.resize((2, 2), Image.ANTIALIAS)": "image.resize((2, 2), Image.LANCZOS)",
    "isinstance(batch, collections.Mapping)": "isinstance(batch, collections.abc.Mapping)",
    "from collections import Iterable": "from collections.abc import Iterable",
    "import base64\nbase64.encodestring(b'x')": "import base64\nbase64.encodebytes(b'x')",
    "import scipy.signal\nscipy.signal.hann(8)": "import scipy.signal\nscipy.signal.windows.hann(8)",
    "tf.Session()": "tf.compat.v1.Session()",
    "from transformers import DetrFeatureExtractor": (
        "from transformers import DetrImageProcessor as DetrFeatureExtractor"
    ),
    "plt.style.use(['ggplot', 'seaborn'])": "plt.style.use(['ggplot', 'seaborn-v0_8'])",
    "axes.grid(b=True)\nplt.hist(x, normed=1)": "axes.grid(visible=True)\nplt.hist(x, density=1)",
    "table.to_csv('x', line_terminator='')": "table.to_csv('x', lineterminator='')",
    "datasets.load_dataset('x', use_auth_token=True)": "datasets.load_dataset('x', token=True)",
    "TrainingArguments('x', evaluation_strategy='no')": "TrainingArguments('x', eval_strategy='no')",
    "given['evaluation_strategy'], args.evaluation_strategy": "given['eval_strategy'], args.eval_strategy",
    "TrainingArguments('x', per_gpu_eval_batch_size=2)": "TrainingArguments('x', per_device_eval_batch_size=2)",
    "AutoTokenizer.from_pretrained('x', use_auth_token=True)": "AutoTokenizer.from_pretrained('x', token=True)",
    "for n, column in pandas.DataFrame().iteritems(): pass": "for n, column in pandas.DataFrame().items(): pass",
    "Trainer(model, tokenizer=t)": "Trainer(model, processing_class=t)",
    "class Mine(Seq2SeqTrainer):\n    def __init__(self):\n        super().__init__(tokenizer=t)": (
        "class Mine(Seq2SeqTrainer):\n    def __init__(self):\n        super().__init__(processing_class=t)"
    ),
}


def test_equivalent_names_are_written() -> None:
    before = "\n".join([*RENAMED, ""])
    assert port(before)[0].splitlines() == "\n".join(RENAMED.values()).splitlines()
    assert reasons(before) == []


OF_MODE = "fromarray(mode=) raises an error since Pillow 12, unless the mode fits the type of the array"
GONE = {
    "np.in1d(x, y)": "numpy.in1d is gone since numpy 2.4",
    "np.asscalar(x)": "numpy.asscalar is gone since numpy 1.23",
    "np.find_common_type": "np.find_common_type will be removed in NumPy 2.0",
    "np.sum(x for x in y)": "numpy.sum() of a generator is gone since numpy 2.4",
    "lr_scheduler.StepLR(o, 1, verbose=False)": "StepLR(verbose=) is gone since torch 2.7",
    "torch.optim.lr_scheduler.LambdaLR(o, f, verbose=True)": "LambdaLR(verbose=) is gone since torch 2.7",
    "from torch._six import inf": "torch._six is gone since torch 2.0",
    "torch.solve(a, b)": "torch.solve raises an error since torch 2.0",
    "torch.cuda.LongTensor(3)": "torch.cuda.LongTensor needs a GPU, and takes the current one",
    "Image.fromarray(x, mode='F')": OF_MODE,
    "Image.fromarray(x, 'RGB')": OF_MODE,
    "table = table.append({}, ignore_index=True)": "DataFrame.append(ignore_index=) is gone since pandas 2.0",
    "plt.gca(projection='3d')": "gca(projection=) is gone since matplotlib 3.6",
    "yaml.load(file)": "load() without Loader= is gone since PyYAML 6",
    "from scipy.signal import gaussian": "scipy.signal.gaussian is gone since scipy 1.13",
    "from scipy.misc import logsumexp": "scipy.misc.logsumexp is gone since scipy 1.3",
    "from sklearn.metrics import plot_roc_curve": "sklearn.metrics.plot_roc_curve is gone since scikit-learn 1.2",
    "import pkg_resources": "pkg_resources is gone since setuptools 82",
    "font.getsize('x')": "FreeTypeFont.getsize is gone since Pillow 10",
    "time.clock()": "time.clock is gone since Python 3.8",
    "tf.estimator.BoostedTreesClassifier()": "tensorflow.estimator.BoostedTreesClassifier is gone since tensorflow 2.9",
    "datasets.load_metric('glue')": "datasets.load_metric is gone since datasets 3.0",
    "from transformers import AdamW": "transformers.AdamW is gone since transformers 4.50",
    "from transformers.optimization import AdamW": "transformers.optimization.AdamW is gone since transformers 4.50",
    "from transformers import glue_convert_examples_to_features as convert": (
        "transformers.glue_convert_examples_to_features is gone since transformers 5.20"
    ),
    "from transformers.data.processors.squad import X": "transformers.data.processors is gone since transformers 5.20",
    "tokenizer.batch_encode_plus(x)": "PreTrainedTokenizerBase.batch_encode_plus is gone since transformers 5.0",
    "(x + 1).ptp()": "ndarray.ptp is gone since numpy 2.0",
    "TrainingArguments('x', no_cuda=True)": "TrainingArguments(no_cuda=) is gone since transformers 5.0",
    "args.overwrite_output_dir": "overwrite_output_dir of TrainingArguments is gone since transformers 5.0",
    "given = {'warmup_ratio': 0.1}": "warmup_ratio of TrainingArguments is gone since transformers 5.15",
}


def test_other_names_are_problems() -> None:
    text = "\n".join([*GONE, ""])
    after, findings = port(text)
    assert after == text
    first = IMPORTS.count("\n") + 1
    problems = [found for found in findings if found.severity is Severity.problem]
    assert {found.line - first: found.reason for found in problems} == dict(enumerate(GONE.values()))


@pytest.mark.parametrize(
    "code",
    [
        "np.float32(1), np.floating, np.prod([1]), collections.OrderedDict()",
        "torch.load('weights.pt', weights_only=True), yaml.load(file, yaml.Loader), yaml.load(file, Loader=L)",
        "Image.fromarray(x).resize((2, 2), Image.LANCZOS)",
        "lr_scheduler.StepLR(optimizer, 1), torch.linalg.solve(a, b), np.sum([x for x in y])",
        "try:\n    from transformers import AdamW\nexcept ImportError:\n    from torch.optim import AdamW",
        "if hasattr(torch, 'symeig'):\n    torch.symeig(x)",
        "class Mine(Trainer):\n    def __init__(self, tokenizer): pass\nMine(tokenizer=t)",
        "class Mine(Trainer):\n    def run(self): super().evaluate(tokenizer=t)",
        "np.ptp(x), pandas.io.iteritems, datasets.Dataset",
        "float = 1\ntokenizer = Tokenizer(tokenizer=1)",
    ],
)
def test_present_and_guarded_names_stay(code: str) -> None:
    after, findings = port(f"{code}\n")
    assert (after, findings) == (f"{code}\n", [])


@pytest.mark.parametrize(
    ("asked", "is_gone"),
    [("getattr(context, 'x', 1)", True), ("hasattr(np, 'trapezoid')", False), ("hasattr(numpy, 'trapz')", False)],
)
def test_guards_cover_mentioned_names(asked: str, is_gone: bool) -> None:
    assert bool(reasons(f"if {asked}:\n    y = np.trapz(x)\n")) == is_gone
    assert (port(f"if {asked}:\n    y = np.Inf, np.trapz\n")[0].find("np.inf") > 0) == (is_gone or "numpy" in asked)


@pytest.mark.parametrize(
    "line",
    [
        "def norm(x: torch.cuda.FloatTensor): pass",
        "isinstance(x, (int, torch.cuda.FloatTensor))",
        "x = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor",
    ],
)
def test_cuda_types_may_annotate(line: str) -> None:
    assert reasons(f"{line}\n") == []


@pytest.mark.parametrize(
    ("pin", "is_gone"),
    [("==4.57.6", False), (">=4.57,<5", False), ("<4.30", True), (">=4.20", True), ("==5.1.*", True), ("", True)],
)
def test_allowed_pins_decide(pin: str, is_gone: bool) -> None:
    libraries = Libraries({"transformers": pin}, frozenset({"transformers"}))
    assert bool(reasons("from transformers import TFBertModel\n", libraries)) == is_gone


def in_files(directory: Path, files: dict[str, str]) -> dict[str, FilePort]:
    """Write the files of a project and port it."""
    for name, text in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    return {port.path.name: port for port in port_project([directory]).files}


def test_pins_are_read_and_checked(tmp_path: Path) -> None:
    project = {
        "requirements.txt": "determined==0.26.0\ntransformers[torch] >= 4.28.1, <4.29.0\ntorch>=1.9\n",
        "environment.yaml": "dependencies: [{pip: ['datasets==4.0.0']}]\n",
        "train.py": "import determined\nfrom transformers import Trainer\n",
        "run.json": '{"pip": "transformers==4.57.1"}',
    }
    (finding,) = in_files(tmp_path, project)["requirements.txt"].findings
    assert (finding.line, finding.reason.partition(" is")[0]) == (2, "transformers[torch] >= 4.28.1, <4.29.0")
    libraries = read_libraries(sorted(tmp_path.iterdir()))
    pins = {"transformers": ">= 4.28.1, <4.29.0", "datasets": "==4.0.0", "torch": ">=1.9"}
    assert libraries.pins == {"determined": "==0.26.0", **pins}  # none of JSON
    assert libraries.imported >= {"determined", "transformers"}


def test_options_are_ported_in_yaml(tmp_path: Path) -> None:
    config = textwrap.dedent(
        """\
        entrypoint: python3 train.py --evaluation_strategy steps --overwrite_output_dir --own_evaluation_strategy 1
        hyperparameters:
          global_batch_size: 1
          training_args: {evaluation_strategy: steps, "per_gpu_eval_batch_size": 1}
          per_gpu_train_batch_size: 4
          logging_dir: logs
        searcher: {name: single, metric: loss, max_length: {batches: 1}}
        """
    )
    after, findings = port_options(config, WITH_TRANSFORMERS)
    assert after == re.sub(r"(?<!own_)evaluation_strategy", "eval_strategy", config).replace("per_gpu", "per_device")
    assert [(found.line, found.reason.split(" is")[0]) for found in findings] == [
        (1, "overwrite_output_dir of TrainingArguments"),
        (6, "logging_dir of TrainingArguments"),
    ]
    assert port_options(config, Libraries()) == (config, [])


def test_options_are_ported_in_json(tmp_path: Path) -> None:
    settings = '{"evaluation_strategy": "steps",\n "logging_dir": "logs"}\n'
    program = "from transformers import TrainingArguments\nimport determined\n"
    port = in_files(tmp_path, {"train.py": program, "arguments.json": settings})["arguments.json"]
    assert port.after == settings.replace("evaluation", "eval")
    assert [finding.line for finding in port.findings] == [2]
    assert "arguments.json" not in in_files(tmp_path, {"train.py": "import determined, transformers\n"})
    words = r'{"a": "x, evaluation_strategy: y", "b": "\"evaluation_strategy\": 1"}'
    assert port_json(words, WITH_TRANSFORMERS) == (words, [])
    keys = '{"c": ["--evaluation_strategy", "no"],\n "evaluation_strategy" : "no"}'
    assert port_json(keys, WITH_TRANSFORMERS) == (keys.replace("evaluation", "eval"), [])


def test_doubtful_names_are_no_problems() -> None:
    (note,) = port("torch.load('model.pt')\n")[1]
    assert note.severity is Severity.note
    (check,) = port("rows.append(1)\ntable = table.append(other)\n")[1]  # a value that is not used is of a list
    assert (check.severity, check.line) == (Severity.check, IMPORTS.count("\n") + 2)


def test_derived_trainers_take_new_arguments(tmp_path: Path) -> None:
    head = "from transformers import Trainer\n"
    project = {
        "plain.py": f"{head}class Plain(Trainer):\n    def __init__(self, *a, x=1, **k): pass\n",
        "own.py": f"{head}class Own(Trainer):\n    def __init__(self, tokenizer, **k): pass\n",
        "train.py": "import determined, transformers\nPlain(tokenizer=t)\nOwn(tokenizer=t)\n",
    }
    after = in_files(tmp_path, project)["train.py"].after
    assert after.splitlines()[1:] == ["Plain(processing_class=t)", "Own(tokenizer=t)"]


OLD_OPTION = "evaluation_strategy"


@pytest.mark.parametrize(
    "program",
    [
        f"strategy = {{'eval_strategy': 1}} if new else {{'{OLD_OPTION}': 1}}\n",
        f"dict(eval_strategy=context.get_hparam('{OLD_OPTION}'))\n",
        f"def make({OLD_OPTION}='no'): return TrainingArguments('x', eval_strategy={OLD_OPTION})\n",
        "click.option('--evaluation-strategy')\n",
    ],
)
def test_own_options_keep_their_names(program: str, tmp_path: Path) -> None:
    head = "import det_lightning\nfrom transformers import TrainingArguments\n"
    project = {
        "train.py": head + program,
        "caller.py": f"import train\ntrain.make({OLD_OPTION}='steps')\n",
        "run.sh": f"python train.py --{OLD_OPTION} steps\n",
        "arguments.yaml": f"{OLD_OPTION}: steps\n",
        "direct.py": f"{head}TrainingArguments('x', {OLD_OPTION}='no')\n",
    }
    ported = in_files(tmp_path, project)
    assert [name for name, port in ported.items() if port.changed] == ["direct.py"]
    assert ported["direct.py"].after.endswith("TrainingArguments('x', eval_strategy='no')\n")


#: Projects in which nothing is to be ported, by what they have of their own.
OWN_NAMES: dict[str, dict[str, str]] = {
    "options": {
        "train.py": "import det_lightning, transformers\nprint(args.warmup_ratio)\n",
        "const.yaml": f"hyperparameters: {{logging_dir: x, {OLD_OPTION}: steps}}\n",
    },
    "modules": {
        "datasets/__init__.py": "def load_metric(name): pass\n",
        "models/__init__.py": "",
        "models/transformers.py": "def AdamW(): pass\n",
        "a.py": "import det_lightning\nfrom datasets import load_metric\nfrom models.transformers import AdamW\n",
    },
    "methods": {
        "table.py": "import det_lightning\nclass Table:\n    def iteritems(self): pass\n",
        "rows.py": "import pandas\nfrom table import Table\nTable().iteritems()\n",
        "slow.py": "# pandas is too slow\nimport det_lightning\nx.iteritems()\nx.ptp()\n",
    },
    "trainers": {
        "engine.py": "from base import Trainer\nclass Mine(Trainer):\n    pass\n",
        "train.py": "import det_lightning, transformers\nMine(tokenizer=1)\n",
    },
    "comments": {"requirements.txt": "det-lightning\n# torch==1.9.0 did not work\nnumpy # torch==1.9\n"},
}


@pytest.mark.parametrize("what", OWN_NAMES)
def test_own_names_stay(what: str, tmp_path: Path) -> None:
    assert in_files(tmp_path, OWN_NAMES[what]) == {}


def test_options_of_a_parser_stay(tmp_path: Path) -> None:
    parser = "parser = argparse.ArgumentParser()\nparser.add_argument('--no_cuda')\nargs = parser.parse_args()\n"
    program = f"import argparse, transformers, determined\n{parser}print(args.no_cuda)\n"
    ported = in_files(tmp_path, {"train.py": program, "run.sh": "python train.py --no_cuda\n"})
    assert [finding for port in ported.values() for finding in port.findings] == []


def test_gone_names_make_entry_points_wait() -> None:
    project = {
        "const.yaml": "entrypoint: m:T\nhyperparameters: {global_batch_size: 1}\n"
        "searcher: {name: single, metric: loss, max_length: {batches: 1}}\n",
        "m.py": "import layers\nfrom determined.pytorch import PyTorchTrial\nclass T(PyTorchTrial): pass\n",
        "layers.py": "import torch\ntorch.symeig(x)\n",
    }
    in_files(Path(), project)
    (entry,) = port_project([Path()]).entry_points
    assert entry.sentence.endswith("once this is changed: layers.py:2 (torch.symeig raises an error since torch 2.0)")


def test_extras_have_the_new_names() -> None:
    needed = {one.name: one.specifier for one in map(Requirement, requires("det-lightning") or [])}
    assert not needed["transformers"].contains("4.45")  # eval_strategy came with 4.41, processing_class with 4.46
    assert not needed["datasets"].contains("3.99")
    assert all(re.search(r"\d|since|GPU", row.gone) and (row.replacement or row.advice) for row in read_table())
