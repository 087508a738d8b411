"""Files that users name, written whole or not at all."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from det_lightning.files.local_files import write_output


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Let files have at most so many bytes, as on a disk that is almost full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_file_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("old")
    page.chmod(0o640)
    link.symlink_to(page.name)
    write_output(link, "new \udcff")
    assert page.read_text() == r"new \udcff"
    assert page.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()


def test_file_stays_whole_on_a_full_disk(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    with at_most(1000), pytest.raises(OSError, match=r"File too large: .*page\.html"):
        write_output(page, "new" * 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert page.read_text() == "old"


def test_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_output(tmp_path / "pipe", "content")
    reader.join()
    assert read == ["content"]
