"""The pages of the documentation: their examples run, their links lead somewhere, the files that they name exist."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.launching import ROOT
from tests.tracked import tracked
from tests.warm_python import WarmPython

PAGES = tracked("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/README.md")
#: Examples that the tests in tests/testing run.
TESTED_ELSEWHERE = ROOT / "docs" / "testing.md"
#: The trial that the examples import: any with the metric "validation_loss".
TRIAL = (ROOT / "tests" / "testing" / "correct_trial.py").read_text().replace("from determined ", "from det_lightning ")

#: Pages whose examples need a library, and the tox environment that has it.
WITH_LIBRARY = {"transformers.md": ("transformers", "transformers")}
#: Pages whose examples begin where there are checkpoints.
BEGIN_WITH_CHECKPOINTS = ("checkpoints.md", "inference.md", "notebooks.md")

# A comment before a block says why it does not run as it stands: <!-- fragment: reason -->
_EXAMPLE = re.compile(r"(?<!-->\n)^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_YAML = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_EXAMPLES = [
    pytest.param(page, source, id=f"{page.name}-{number}")
    for page in PAGES
    if page != TESTED_ELSEWHERE
    for number, source in enumerate(_EXAMPLE.findall(page.read_text()), 1)
]
_FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")


def run(python: WarmPython, source: str, folder: Path) -> None:
    (folder / "example.py").write_text(source)
    done = python.run(folder / "example.py", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def project(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a trial and its checkpoints, as the README's first example leaves them."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "model_def.py").write_text(TRIAL)
    (folder / "adaptive.yaml").write_text(_YAML.search((ROOT / "docs" / "experiments.md").read_text()).group(1))
    run(warm_python, _EXAMPLE.search((ROOT / "README.md").read_text()).group(1), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("page", "source"), _EXAMPLES)
def test_python_examples_run(page: Path, source: str, project: Path, warm_python: WarmPython, tmp_path: Path) -> None:
    if page.name in WITH_LIBRARY:
        library, tox_environment = WITH_LIBRARY[page.name]
        pytest.importorskip(library, reason=f"{library} is not installed; run tox -e {tox_environment}")
    folder = tmp_path / "project"
    without = () if page.name in BEGIN_WITH_CHECKPOINTS else ("checkpoints",)
    shutil.copytree(project, folder, ignore=shutil.ignore_patterns(*without))
    run(warm_python, source, folder)


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in map(slug, re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)), link


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_named_files_exist(name: str) -> None:
    assert [path for path in _FILE.findall((ROOT / name).read_text()) if not (ROOT / path).exists()] == []


def test_files_in_diagrams_exist() -> None:
    labels = re.findall(r"<br>([^\"<]+)\"", (ROOT / "ARCHITECTURE.md").read_text())
    named = [path for label in labels for path in label.split(", ") if "/" in path]
    assert len(named) > 20
    assert [path for path in named if not (ROOT / "det_lightning" / path).exists()] == []
