"""Files that may hold secrets, which only their owner may read, whatever the directory and the umask allow."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterable
from typing import IO, Any

_MODE = 0o600


def write_private(path: pathlib.Path, content: str | bytes) -> None:
    """Write a file as a whole, or not at all; only its owner may read it."""
    draft = path.with_name(f"{path.name}.tmp")
    draft.unlink(missing_ok=True)  # its mode may be another one
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    draft.replace(path)


def open_private(path: pathlib.Path, mode: str) -> IO[Any]:
    """Open a file as ``open`` does; if that creates it, only its owner may read it."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, _MODE))


def make_private(paths: Iterable[pathlib.Path]) -> None:
    """Let only their owner read these files, which an earlier release may have written; others stay as they are."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            path.chmod(_MODE)
