"""Wheel and sdist are installed with all that they need, and train an example; `tox -e install` runs this."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(directory), str(ROOT)], check=True)
    return directory


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_an_empty_environment_trains_an_example(distributions: Path, kind: str, tmp_path: Path) -> None:
    (file,) = distributions.glob(kind)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    (python,) = [str(path) for path in (tmp_path / "venv").glob("*/python*") if path.stem == "python"]
    install = [python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(file)]
    subprocess.run(install, check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True)
    example = ROOT / "examples" / "distributed"
    (script,) = [str(path) for path in (tmp_path / "venv").glob("*/det-lightning*") if path.is_file()]
    command = [script, "run", str(example / "const.yaml"), str(example), "--config", "searcher.max_length.epochs=1"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert list(tmp_path.glob("experiments/one-process-1/**/metadata.json"))
