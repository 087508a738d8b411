"""Locks on local files that end with the process which holds them, however it ends."""

from __future__ import annotations

import os
import pathlib
import weakref
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["make_directory", "try_to_lock"]

_MOST_ATTEMPTS = 100

_held: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def try_to_lock(file: IO[bytes]) -> bool | None:
    """Lock a file until it is closed or the process ends; return False if something else has the lock.

    None where the system, or the file system, knows no locks. Processes that are forked do not get the lock: a loader's
    worker that outlives its parent by some seconds must not keep the next run from it.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    _held.add(file)
    return True


def make_directory(path: pathlib.Path) -> None:
    """Make a directory that other processes make and, while it is empty, remove at the same time.

    Raises:
        OSError: it can not be made.
    """
    for attempt in range(_MOST_ATTEMPTS):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, FileNotFoundError):
            if attempt == _MOST_ATTEMPTS - 1 or path.is_file():
                raise
        else:
            return


def _leave_to_parent() -> None:
    """Point the descriptors of inherited locks elsewhere; to close them would leave file objects that close others."""
    files = [file for file in _held if not file.closed]
    _held.clear()
    if not files:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in files:
        os.dup2(nothing, file.fileno(), inheritable=False)
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
