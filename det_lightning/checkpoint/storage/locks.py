"""Locked files that mark checkpoints that are being written, and show whether their writer lives.

On a local disk the writer holds a lock on its mark, which ends with the process, however that ends. Elsewhere a mark
counts as abandoned after a day.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import socket
import time
import weakref
from typing import IO

from det_lightning.checkpoint.storage.location import Location

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_MOST_ATTEMPTS = 100
_held: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def try_to_lock(file: IO[bytes]) -> bool | None:
    """Lock a file until it is closed or the process ends; return False if something else has the lock.

    None where the system, or the file system, has no locks. Forked processes do not get the lock: a loader's worker
    that outlives its parent by some seconds must not lock out the next run.
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
    """Make a directory that other processes make and, while it is empty, remove at the same time."""
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

MARK_SUFFIX = ".json"

# No checkpoint takes so long to write.
_ABANDONED_AFTER_S = 24 * 3600.0


def mark_content() -> bytes:
    """Return the content of a mark: host, process and time."""
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}).encode()


def is_abandoned(mark: Location) -> bool:
    """Return whether the process that made this mark is known to be gone."""
    try:
        if mark.is_local:
            with _open(mark.local_path, os.O_RDWR) as file:
                lock_taken = try_to_lock(file)
            if lock_taken is not None:
                return lock_taken
        age_s = time.time() - float(json.loads(mark.read())["started"])
    except (FileNotFoundError, PermissionError, IsADirectoryError):  # just finished, or another user's, or not a mark
        return False
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False
    return math.isfinite(age_s) and age_s > _ABANDONED_AFTER_S


def write_locked(mark: pathlib.Path) -> IO[bytes]:
    """Write a mark that is locked before it gets the name under which others look for it."""
    unnamed = mark.with_suffix(".new")
    while True:
        make_directory(mark.parent)
        try:
            file = _open(unnamed, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        except FileNotFoundError:  # another writer has just removed the empty directory
            continue
        try:
            file.write(mark_content())
            file.flush()
            if try_to_lock(file) is not False:
                unnamed.replace(mark)
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            unnamed.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # what could not be written yet
                file.close()
            raise
        file.close()  # another run took it for an abandoned one before it was locked


def _open(path: pathlib.Path, flags: int) -> IO[bytes]:
    """Open a mark for reading and writing; do not follow a link."""
    return os.fdopen(os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666), "r+b")
