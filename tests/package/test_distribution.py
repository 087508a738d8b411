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
MAPPED = {"det_lightning": "det_lightning", **{name: f"det_lightning/{name}" for name in ("adapters", "callbacks")}}


@pytest.fixture(scope="module")
def clone_without_links(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which git wrote the symbolic links as text, as on Windows."""
    if not (ROOT / ".git").exists():
        pytest.skip("not in a clone")
    clone = tmp_path_factory.mktemp("clone") / "det_lightning"
    command = ["git", "clone", "--quiet", "--depth", "1", "-c", "core.symlinks=false", ROOT.as_uri(), str(clone)]
    subprocess.run(command, check=True)
    return clone


@pytest.fixture(scope="module", params=["this tree", "a clone without links"])
def distributions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this tree with only what pyproject.toml asks for, of the clone with what is installed, which is faster."""
    is_tree = request.param == "this tree"
    source, options = (ROOT, []) if is_tree else (request.getfixturevalue("clone_without_links"), ["--no-isolation"])
    directory = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", *options, "--outdir", str(directory), str(source)], check=True)
    return directory


def modules_in_the_repository() -> set[str]:
    return {
        f"{installed}/{path.relative_to(ROOT / source).as_posix()}"
        for source, installed in MAPPED.items()
        for path in (ROOT / source).rglob("*.py")
        if not (path.parent != ROOT / source and any(p.is_symlink() for p in path.parents))
    }


def test_the_wheel_is_whole(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    assert {name for name in names if name.endswith(".py")} == modules_in_the_repository()
    assert "det_lightning/py.typed" in names
    pages = ("page.css", "page.html.jinja", "page.js", "page_parts.html.jinja")
    reports = ("experiments/report", "porting/move", "testing/report")
    for name in (*(f"pages/{page}" for page in pages), *(f"{report}.html.jinja" for report in reports)):
        assert f"det_lightning/{name}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"det_lightning"}


def test_the_sdist_can_be_built_from(distributions: Path) -> None:
    # `build` made the wheel from the unpacked sdist, so its sources are complete; the licence has to be there too.
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members}
    assert {"LICENSE", "README.md", "pyproject.toml", "adapters/module.py", "callbacks/checkpoint.py"} <= names
    assert [member.name for member in members if member.issym() or member.islnk()] == []
    assert [member.name for member in members if member.name.endswith("det_lightning/adapters")] == []


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_it_is_installed_in_an_empty_environment(distributions: Path, kind: str, tmp_path: Path) -> None:
    # Without what it depends on, which is gigabytes; `tox -e install` installs that, too.
    (file,) = distributions.glob(kind)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    (python,) = [path for path in (tmp_path / "venv").glob("*/python*") if path.stem == "python"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(file)], check=True)
    code = "import det_lightning; print(det_lightning.__version__, det_lightning.__file__)"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    version, _, path = done.stdout.strip().partition(" ")
    assert f"-{version}" in file.name
    installed = Path(path).parent
    assert {f"det_lightning/{module.relative_to(installed).as_posix()}" for module in installed.rglob("*.py")} == (
        modules_in_the_repository()
    )
    assert [script for script in (tmp_path / "venv").glob("*/det-lightning*") if script.is_file()]


def test_a_clone_without_links_that_is_not_installed_says_what_to_do(clone_without_links: Path) -> None:
    # -S leaves out whatever det_lightning is installed here.
    command = [sys.executable, "-S", "-c", "import det_lightning.adapters"]
    done = subprocess.run(command, cwd=clone_without_links, capture_output=True, text=True)
    assert done.returncode == 1
    assert "det_lightning.errors.MissingLinks: " in done.stderr
    assert "git config core.symlinks true" in done.stderr
