"""The wheel and the sdist hold the whole package, and nothing that lies beside it."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# How the repository's directories are named once installed.
MAPPED = {
    "det_lightning": "det_lightning",
    "adapters": "det_lightning/adapters",
    "callbacks": "det_lightning/callbacks",
}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(directory), str(ROOT)], check=True)
    return directory


def modules_in_the_repository() -> set[str]:
    return {
        f"{installed}/{path.relative_to(ROOT / source).as_posix()}"
        for source, installed in MAPPED.items()
        for path in (ROOT / source).rglob("*.py")
        if not (path.parent != ROOT / source and any(p.is_symlink() for p in path.parents))
    }


def test_the_wheel_holds_every_module_once(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    assert {name for name in names if name.endswith(".py")} == modules_in_the_repository()


def test_the_wheel_is_typed_licensed_and_installs_one_name(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "det_lightning/py.typed" in names
    assert "det_lightning/testing/report.html.jinja" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"det_lightning"}


def test_the_sdist_can_be_built_from(distributions: Path) -> None:
    # `build` made the wheel from the unpacked sdist, so its sources are complete; the licence has to be there too.
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "adapters/module.py", "callbacks/checkpoint.py"} <= names
