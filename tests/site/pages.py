"""The pages of the documentation as their tests see them: blocks of code, and what is said before each."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tests.launching import ROOT
from tests.tracked import tracked

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
    """A block of code."""

    page: str  # the file, from the repository's root
    line: int  # where its text begins
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
        reason, file = _NOT_RUN.fullmatch(before), _FILE.fullmatch(before)
        found.append(
            Block(
                page=page.relative_to(ROOT).as_posix(),
                line=text.count("\n", 0, match.start("text")) + 1,
                language=match["language"],
                text=match["text"],
                reason=reason and reason["reason"],
                file=file and file["name"],
            )
        )
    return found
