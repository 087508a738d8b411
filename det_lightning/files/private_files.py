"""Local files that are written whole or not at all, and private files, which only their owner may read."""

from __future__ import annotations

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterable
from typing import IO, Any

_PRIVATE = 0o600


def write_whole(path: pathlib.Path, content: bytes, *, mode: int = 0o666, sync: bool = False) -> None:
    """Write a file completely or not at all, in a directory that is created if necessary.

    The umask applies to ``mode``. With ``sync``, wait until the content is on the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another container that writes this file may have the same process id.
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_private(path: pathlib.Path, content: str | bytes) -> None:
    """Write a file completely or not at all; only the owner may read the file, whatever the umask allows."""
    write_whole(path, content.encode() if isinstance(content, str) else content, mode=_PRIVATE)


def open_private(path: pathlib.Path, mode: str) -> IO[Any]:
    """Open a file like ``open``; only the owner may read a file that this creates."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, _PRIVATE))


def make_private(paths: Iterable[pathlib.Path]) -> None:
    """Let only the owner read these files of an earlier release; skip missing files and other users' files."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            path.chmod(_PRIVATE)
