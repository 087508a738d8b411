"""Names that the installed libraries do not have: what is renamed, what is a problem, and what is left alone."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import numpy
import pytest
import torch
import torchmetrics
from packaging.version import Version

from det_lightning.porting import ProjectPort, Severity, port_project
from det_lightning.porting.library_names import check_libraries
from det_lightning.porting.python_files import port_python

# The names depend on the releases that are installed.
pytestmark = pytest.mark.skipif(Version(numpy.__version__) < Version("2.4"), reason="numpy is of before 2.4")


def port(files: dict[str, str]) -> ProjectPort:
    """Write files here, and port them without writing."""
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    return port_project([Path()])


def problems(project: ProjectPort) -> dict[str, str]:
    """Return the reasons of problems by file and line."""
    left = [(ported, found) for ported in project.files for found in ported.findings]
    return {f"{one.path}:{found.line}": found.reason for one, found in left if found.severity is Severity.problem}


RENAMED = {
    "np.zeros(3, dtype=np.float)": "np.zeros(3, dtype=float)",
    "x = np.int(np.product([1.0]))": "x = int(np.prod([1.0]))",
    "np.Inf, np.NaN": "np.inf, np.nan",
    "from collections import Iterable": "from collections.abc import Iterable",
    "if hasattr(np, 'trapezoid'):\n    y = np.Inf": "if hasattr(np, 'trapezoid'):\n    y = np.Inf",
    "try:\n    from collections import Mapping\nexcept ImportError:\n    pass": (
        "try:\n    from collections import Mapping\nexcept ImportError:\n    pass"
    ),
}


def test_names_that_ruff_knows_are_written() -> None:
    before = "import numpy as np\n" + "\n".join([*RENAMED, ""])
    after = "import numpy as np\n" + "\n".join([*RENAMED.values(), ""])
    assert port_python(before) == (after, [])
    assert port_python(after) == (after, [])


TORCH = f"torch {torch.__version__}"
METRICS = f"torchmetrics {torchmetrics.__version__}"
GONE = {
    "from torch._six import inf": f"the module torch._six is not in {TORCH}",
    "from torchmetrics import F1": f"torchmetrics.F1 is not in {METRICS}",
    "torch.ifft(x, 1)": f"torch.ifft is not in {TORCH}",
    "torch.fft(x, 1)": f"torch.fft is a module in {TORCH}, no function",
    "torchmetrics.Accuracy()": f"torchmetrics.classification.accuracy.Accuracy() needs task= in {METRICS}",
    "StepLR(optimizer, 1, verbose=True)": f"torch.optim.lr_scheduler.StepLR() takes no verbose= in {TORCH}",
    "Sampler.in1d = np.trapz": f"numpy.trapz is not in numpy {numpy.__version__}",
    "time.clock()": "time.clock is not in Python {}.{}".format(*sys.version_info),
}
IMPORTS = "import det_lightning, time, torch, torchmetrics, numpy as np\nfrom torch.optim.lr_scheduler import StepLR\n"


@pytest.mark.slow
def test_names_that_pyrefly_misses_are_problems() -> None:
    text = IMPORTS + "def f(x, optimizer, Sampler):\n" + textwrap.indent("\n".join([*GONE, ""]), "    ")
    assert problems(port({"a.py": text})) == {f"a.py:{line}": reason for line, reason in enumerate(GONE.values(), 4)}


HARMLESS = [
    "np.float32(1), np.floating, np.prod([1]), torch.linalg.solve, torch.utils.data.DataLoader([], 1)",
    "try:\n    from torch._six import inf\nexcept ImportError:\n    inf = float('inf')",
    "if hasattr(torch, 'symeig'):\n    torch.symeig(1)",
    "if torch.__version__ < '1.8':\n    torch.ifft(1, 1)",
    "torch.ifft(1, 1)  # det-lightning: ok",
    "def f(a): pass\nf(b=1)\nclass Own:\n    def __init__(self, a): pass\nOwn(b=1), Own()",
    "from PIL import Image\nImage.BILINEAR",  # set when the module runs
    "from scipy.spatial import cKDTree",  # of an extension module
    "import six.moves.urllib\nfrom matplotlib.lines import CARETUPBASE",  # made when six runs; not in the stub
    "from google.protobuf import struct_pb2\nstruct_pb2.Value",
    "from datasets import load_metric\nfrom helpers.scipy import toimage\nimport scipy.misc.x",  # of the project
]


@pytest.mark.slow
def test_other_code_has_no_problem() -> None:
    own = {"datasets/__init__.py": "", "helpers/scipy.py": "def toimage(): pass\n"}
    project = port({**own, **{f"{number}.py": f"{IMPORTS}{code}\n" for number, code in enumerate(HARMLESS)}})
    assert (problems(project), project.unchecked) == ({}, [])


def test_lines_are_those_of_the_original() -> None:
    imports = "from determined.experimental import client\nfrom determined import pytorch\n\n\n# 1\nimport torch\n"
    cells = [{"cell_type": "code", "source": ["!pip install determined\n", "import torch\n", "torch.ifft()\n"]}]
    project = port({"a.py": f"{imports}torch.ifft()\n", "b.ipynb": json.dumps({"cells": cells}, indent=1) + "\n"})
    reason = f"torch.ifft is not in {TORCH}"
    assert problems(project) == {"a.py:7": reason, "b.ipynb:8": reason}


def test_packages_that_are_not_installed_are_named_once() -> None:
    code = "import det_lightning, timm\nfrom timm.models import x\nfrom apex import amp\n"
    project = port({"a.py": code, "b.py": "import determined, timm, a\n"})
    assert (problems(project), project.unchecked) == ({}, ["not installed, not checked: apex, timm"])
    assert port_project([Path("b.py")]).unchecked == ["not installed, not checked: timm"]


@pytest.mark.slow
def test_a_missing_name_makes_entry_points_wait() -> None:
    config = "entrypoint: m:T\nsearcher: {name: single, metric: loss, max_length: {batches: 1}}\n"
    trial = "import layers\nfrom determined.pytorch import PyTorchTrial\nclass T(PyTorchTrial): pass\n"
    project = port({"const.yaml": config, "m.py": trial, "layers.py": "import torch\ntorch.ifft(x)\n"})
    (entry,) = project.entry_points
    assert entry.sentence.endswith(f"once this is changed: layers.py:2 (torch.ifft is not in {TORCH})")


def test_nothing_of_the_project_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    build = 'type = "custom"\ncommand = ["touch", "ran"]\n'
    python = '#!/bin/sh\ntouch "$(dirname "$0")/ran"\n'
    files = {
        "pyrefly.toml": f'python-interpreter-path = "python"\n[build-system]\n{build}',
        "pyproject.toml": f"[tool.pyrefly.build-system]\n{build}",
        "python": python,
        **dict.fromkeys(["json.py", "site.py", "torch/__init__.pyi"], "open('ran', 'w')\n"),
    }
    port(files)
    Path("python").chmod(0o700)
    monkeypatch.setenv("PYREFLY_CONFIG", str(Path("pyrefly.toml").resolve()))
    project = port({"a.py": "import determined, torch\ntorch.ifft()\n"})
    assert problems(project) == {"a.py:2": f"torch.ifft is not in {TORCH}"}
    assert not Path("ran").exists()


def test_other_findings_stay_without_pyrefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyrefly", None)
    project = port({"a.py": "import torch\nfrom determined.experimental import client\ntorch.ifft(client)\n"})
    assert list(problems(project)) == ["a.py:2"]
    assert project.unchecked[0].startswith("pyrefly is not installed: names of libraries were not checked (pip install")


def test_pyrefly_has_a_limit() -> None:
    project = port({"a.py": "import determined, torch\ntorch.ifft()\n"})
    _, unchecked = check_libraries(project.files, most_s=0)
    assert unchecked == ["names of libraries were not checked: pyrefly takes longer than 0 s"]
