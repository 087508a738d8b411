"""The commands of the documentation, run as they are written, page by page."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT
from tests.site.pages import PAGES, REASONS, Block, blocks_of

pytestmark = pytest.mark.slow


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
            assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_left_out_commands_have_reasons() -> None:
    reasons = {(block.page, block.line, block.reason) for page in PAGES for block in blocks_of(page) if block.reason}
    assert [place for place in sorted(reasons) if not any(place[2].startswith(known) for known in REASONS)] == []
