"""Type checkers at their defaults find nothing in the examples, as an editor would show: pyright and pyrefly."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT

EXAMPLES = [path.name for path in sorted(ROOT.glob("examples/*")) if any(path.glob("*.py"))]
# An editable installation is found by importing only.
PATHS = ["--search-path", ".", "--search-path", "../packages"]
CHECKERS = {
    "pyright": ["-m", "pyright", "--pythonpath", sys.executable, "."],
    "pyrefly": ["-m", "pyrefly", "check", "--python-interpreter-path", sys.executable, *PATHS, "."],
}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_have_no_findings(checker: str, example: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed; run tox -e types")
    if example == "estimator" and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("needs TensorFlow")
    # Where no configuration is above the files.
    shutil.copytree(ROOT / "examples" / example, tmp_path / example, ignore=shutil.ignore_patterns("output"))
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "det_lightning").symlink_to(ROOT / "det_lightning")
    (tmp_path / example / "pyrightconfig.json").write_text('{"extraPaths": ["../packages"]}')
    done = subprocess.run(
        [sys.executable, *CHECKERS[checker]], cwd=tmp_path / example, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
