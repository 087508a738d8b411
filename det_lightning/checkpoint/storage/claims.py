"""Claims: files by which a process says that it writes a trial's checkpoints, resumes from one, or deletes one.

On a local disk a claim is a locked file, and ends with the process. On a storage without locks, a claim is a file with
host, process and time. Such a claim is advisory: it holds until removed, until the process is known to have ended, or
until two hours after the last renewal, and two processes that claim at the same instant may both succeed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import pathlib
import socket
import time
import uuid
from typing import Any

from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR
from det_lightning.checkpoint.storage.location import Location
from det_lightning.checkpoint.storage.metadata import read_time
from det_lightning.files.local_files import LockedFile, NoLocks, is_locked, lock_file, warn_of_no_locks

# How long a claim without a lock holds unless renewed.
_LASTS_S = 2 * 3600.0
_RENEW_AFTER_S = 300.0
# No checkpoint takes so long to write.
_ABANDONED_AFTER_S = 24 * 3600.0
# Far more than a claim needs.
_MAX_BYTES = 64 * 1024

_WITHOUT_LOCKS = (
    "two runs that start at the same instant may get the same trial, and the claim of a run that was killed on another "
    f"machine counts for {_LASTS_S / 3600:g} hours"
)

# The errors from reading a truncated or damaged claim.
_DAMAGED = (ValueError, KeyError, TypeError, OverflowError, RecursionError)

# Claims of this process; an earlier process may have had the same process id.
_own_tokens: set[str] = set()


class Claim:
    """A claim of this process; see :meth:`take`."""

    def __init__(self, file: Location, lock: LockedFile | None, content: dict[str, Any]) -> None:
        self.file = file
        self._lock = lock  # None where there are no locks
        self._content = content
        self._renewed = time.time()

    @classmethod
    def take(cls, file: Location, purpose: str | None = None) -> Claim | None:
        """Return a claim, or None if another live process has claimed the same; the file says the ``purpose``."""
        content = make_claim()
        if purpose is not None:
            content["purpose"] = purpose
        encoded = json.dumps(content).encode()
        if file.is_local:
            with contextlib.suppress(NoLocks):
                lock = lock_file(file.local_path, encoded)
                return None if lock is None else cls(file, lock, content)
        warn_of_no_locks(_name_storage(file), _WITHOUT_LOCKS)
        if is_claimed(file):
            return None
        file.write(encoded)
        if _read_token(file) != content["token"]:
            return None
        _own_tokens.add(content["token"])
        return cls(file, None, content)

    def is_due(self) -> bool:
        """Return whether the claim must be renewed to stay valid."""
        # The clock may have been set back.
        return self._lock is None and abs(time.time() - self._renewed) > _RENEW_AFTER_S

    def renew(self) -> bool:
        """Write the current time; return False if another process has taken the expired claim."""
        self._renewed = time.time()
        if _read_token(self.file) not in (None, self._content["token"]):
            return False
        self.file.write(json.dumps({**self._content, "renewed": time.time()}).encode())
        return True

    def release(self) -> None:
        """Remove the claim, and the empty directories around the file."""
        _own_tokens.discard(self._content["token"])
        if self._lock is not None:
            self._lock.remove()
        elif not self.is_due() or _read_token(self.file) == self._content["token"]:  # the claim may have expired
            self.file.remove()
        if self.file.is_local:
            remove_if_empty(self.file.local_path.parent)


def _name_storage(file: Location) -> str:
    """Return the storage in whose bookkeeping a claim is."""
    while file.name and file.name != BOOKKEEPING_DIR:
        file = file.parent
    return str(file.parent)


def make_claim() -> dict[str, Any]:
    """Return the content of a new claim; earlier releases read ``started`` in the mark of a checkpoint."""
    now = time.time()
    return {
        "host": socket.gethostname(),
        "machine": _identify_machine(),
        "pid": os.getpid(),
        "token": str(uuid.uuid4()),
        "renewed": now,
        "started": now,
    }


def is_claimed(file: Location) -> bool:
    """Return whether a live process has a claim. If that is unknown, as for another user's, the age decides."""
    try:
        if file.is_local and (locked := is_locked(file.local_path)) is not None:
            return locked
        content = _read(file)
        seen = read_time(file)
    except FileNotFoundError:
        return False
    if not content:
        return False
    try:
        claim = json.loads(content)
        if claim["machine"] == _identify_machine() and not _runs(claim["pid"], claim["token"]):
            return False
        renewed = float(claim["renewed"]) if seen is None else seen
    except _DAMAGED:
        return seen is not None and time.time() - seen < _LASTS_S
    return time.time() - renewed < _LASTS_S


def is_abandoned(mark: Location) -> bool:
    """Return whether the process that marked a checkpoint as being written is known to have ended."""
    try:
        if mark.is_local and (locked := is_locked(mark.local_path)) is not None:
            return not locked
        age_s = time.time() - float(json.loads(_read(mark))["started"])
    except (FileNotFoundError, PermissionError, IsADirectoryError, *_DAMAGED):  # finished, another user's, or no mark
        return False
    return math.isfinite(age_s) and age_s > _ABANDONED_AFTER_S


def _read_token(file: Location) -> object:
    """Return the token in a claim; None if another process has removed or damaged the file."""
    try:
        return json.loads(_read(file))["token"]
    except (FileNotFoundError, *_DAMAGED):
        return None


def _read(file: Location) -> bytes:
    try:
        return file.read(_MAX_BYTES)
    except ValueError as e:
        raise ValueError(f"{e}. The file is not a claim of det_lightning: remove the file") from e


def remove_if_empty(folder: pathlib.Path) -> None:
    """Remove an empty directory in the bookkeeping, and empty parents up to the bookkeeping directory."""
    while BOOKKEEPING_DIR in folder.parts:
        with contextlib.suppress(OSError):
            folder.rmdir()
        if folder.name == BOOKKEEPING_DIR or folder.exists():
            return
        folder = folder.parent


def _runs(pid: int, token: str) -> bool:
    if pid == os.getpid():
        return token in _own_tokens
    try:
        os.kill(pid, 0)
    except OSError as e:
        return not isinstance(e, ProcessLookupError)  # other errors: it may be another user's
    return True


@functools.cache
def _identify_machine() -> str:
    """Return a text that two processes share if each can tell from the other's id whether the other is running."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(pathlib.Path("/proc/self/ns/pid").readlink()))  # containers number their own processes
    return " ".join(parts)
