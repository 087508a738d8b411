"""The commands of the documentation, run as they are written, page by page."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT
from tests.tracked import tracked

pytestmark = pytest.mark.slow

#: The pages with commands: those of the site, and those that a visitor of the repository reads.
PAGES = tracked("*.md", "docs/**/*.md", "benchmarks/README.md")

#: Why commands are not run, as comments of their pages say it.
REASONS = (
    "installs packages",  # what tox installs
    "needs a cluster",
    "needs Determined",  # a master, or an environment with an old release
    "needs Horovod",  # tox -e horovod builds it, which takes minutes
    "needs MLflow",
    "needs Ray",
    "needs Weights & Biases",
    "needs the published package",
    "takes minutes",  # the tests themselves, soak tests and benchmarks
)

_BLOCK = re.compile(r"(?:^(?P<before>[^\n]+)\n\n?)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+) -->")
_FILE = re.compile(r"<!-- file: (?P<name>\S+) -->")


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    place: str  # file and line where its text begins
    language: str  # as the fence says it; empty for output
    text: str
    reason: str | None  # why it is not run
    file: str | None  # what the page calls the file that it is


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        before = match["before"] or ""
        line = text.count("\n", 0, match.start("text")) + 1
        reason, file = _NOT_RUN.fullmatch(before), _FILE.fullmatch(before)
        found.append(
            Block(
                place=f"{page.relative_to(ROOT).as_posix()}:{line}",
                language=match["language"],
                text=match["text"],
                reason=reason and reason["reason"],
                file=file and file["name"],
            )
        )
    return found


#: The fixtures or directories that pages begin with, other than a project that still uses Determined.
BEGINS_WITH = {
    ROOT / "docs" / "distributed.md": "ported_project",
    ROOT / "docs" / "tutorials" / "write-a-trial.md": None,
    ROOT / "docs" / "tutorials" / "leave-determined.md": ROOT / "docs" / "examples" / "leaving",
}

HAS_RAY = importlib.util.find_spec("ray") is not None


def is_run(block: Block) -> bool:
    is_possible = block.reason is None or (block.reason.startswith("needs Ray") and HAS_RAY)
    return block.language == "sh" and is_possible


def pages_with_commands() -> list[Any]:
    pages = [page for page in PAGES if any(is_run(block) for block in blocks_of(page))]
    return [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in pages]


@pytest.fixture
def directory(page: Path, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where the commands of a page are run."""
    begins_with = BEGINS_WITH.get(page, "project")
    if isinstance(begins_with, str):
        begins_with = request.getfixturevalue(begins_with)
    if begins_with is not None:
        return shutil.copytree(begins_with, tmp_path / "project")
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


@pytest.mark.parametrize("page", pages_with_commands())
def test_commands_of_page_run(page: Path, directory: Path, variables: dict[str, str]) -> None:
    for block in blocks_of(page):
        if block.file is not None:
            (directory / block.file).write_text(block.text)
        elif is_run(block):
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            done = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, f"{block.place}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_left_out_commands_have_reasons() -> None:
    reasons = {block.place: block.reason for page in PAGES for block in blocks_of(page) if block.reason}
    assert {place: said for place, said in reasons.items() if not said.startswith(REASONS)} == {}
