"""Leases: claims of processes on something in a storage.

On a local disk a lease is a locked file, which ends with its process. Elsewhere it is a file with host, process and
time, which counts until it is removed, its process is known to have ended, or it was not renewed for some time. Two
processes that take such a lease in the same instant may both get it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import socket
import time
import uuid
from typing import IO, Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR
from det_lightning.checkpoint.storage.location import Location
from det_lightning.checkpoint.storage.locks import make_directory, try_to_lock
from det_lightning.checkpoint.storage.metadata import modified

# How long a lease on a remote storage counts without being renewed.
_LASTS_S = 2 * 3600.0
_RENEW_AFTER_S = 300.0
_PAUSE_S = 0.02

# Leases of this process: its process id alone may be that of an earlier one.
_own_tokens: set[str] = set()


class Lease:
    """A lease that this process holds; see :meth:`take`. ``lock`` is None where there are no locks."""

    def __init__(self, file: Location, lock: IO[bytes] | None, content: dict[str, Any]) -> None:
        self.file = file
        self._lock = lock
        self._content = content
        self._renewed = time.monotonic()

    @classmethod
    def take(cls, file: Location, lasts_s: float = _LASTS_S) -> Lease | None:
        """Return a lease; None if a live process holds one, which counts for ``lasts_s`` where there are no locks."""
        content: dict[str, Any] = {
            "host": socket.gethostname(),
            "machine": _this_machine(),
            "pid": os.getpid(),
            "token": str(uuid.uuid4()),
            "renewed": time.time(),
        }
        if file.is_local:
            with contextlib.suppress(_NoLocks):
                if (lock := _lock_at(file.local_path)) is None:
                    return None
                lock.truncate(0)
                lock.write(_to_bytes(content))
                return cls(file, lock, content)
        if is_claimed(file, lasts_s):
            return None
        file.write(_to_bytes(content))
        if json.loads(file.read()).get("token") != content["token"]:
            return None
        _own_tokens.add(content["token"])
        return cls(file, None, content)

    @classmethod
    def wait_for(cls, file: Location, timeout_s: float = 60.0) -> Lease:
        """Return a lease that is held for moments only, once no other process has it."""
        until = time.monotonic() + timeout_s
        while (lease := cls.take(file, lasts_s=timeout_s)) is None:
            if time.monotonic() > until:
                raise errors.StorageError(
                    f"{file} has been locked for {timeout_s:.0f} s by another process. If there is none, remove it."
                )
            time.sleep(_PAUSE_S if file.is_local else 10 * _PAUSE_S)
        return lease

    def is_due(self) -> bool:
        """Return whether the lease must be renewed to go on counting."""
        return self._lock is None and time.monotonic() - self._renewed > _RENEW_AFTER_S

    def renew(self) -> None:
        """Write the current time."""
        self._renewed = time.monotonic()
        self.file.write(_to_bytes({**self._content, "renewed": time.time()}))

    def release(self) -> None:
        """Give up the lease, and remove the directories that were made for it if they are empty."""
        _own_tokens.discard(self._content["token"])
        if self._lock is None:
            self.file.remove()
        else:
            self.file.local_path.unlink(missing_ok=True)  # while the lock still protects it
            self._lock.close()
        if self.file.is_local:
            _remove_empty_parents(self.file.local_path)

    def __enter__(self) -> Lease:
        """Hold the lease for the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release it."""
        self.release()


def is_claimed(file: Location, lasts_s: float = _LASTS_S) -> bool:
    """Return whether a live process holds a lease; on a local disk, remove one whose process has ended."""
    if file.is_local:
        try:
            lock = _lock_at(file.local_path, create=False)
        except FileNotFoundError:
            return False
        except (_NoLocks, PermissionError):  # another user's, perhaps: its age decides
            pass
        else:
            if lock is not None:
                Lease(file, lock, {"token": ""}).release()
            return lock is None
    try:
        content = file.read()
        seen = modified(file)
    except FileNotFoundError:
        return False
    return _may_live(content, seen, lasts_s)


class _NoLocks(Exception):
    """The system or the file system has no locks."""


def _lock_at(path: pathlib.Path, create: bool = True) -> IO[bytes] | None:
    """Return the file at a path, locked; None if another process has locked it."""
    while True:
        if create:
            make_directory(path.parent)
        try:
            file = path.open("a+b" if create else "r+b", buffering=0)
        except FileNotFoundError:
            if create:  # another process has just removed the empty directory
                continue
            raise
        locked = try_to_lock(file)
        if locked and _is_at(path, file):
            return file
        file.close()
        if locked is None:
            raise _NoLocks
        if not locked:
            return None
        # Its holder removed it before it was locked here.


def _is_at(path: pathlib.Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _remove_empty_parents(path: pathlib.Path) -> None:
    for folder in path.parents:
        with contextlib.suppress(OSError):
            folder.rmdir()
        if folder.name == BOOKKEEPING_DIR or folder.exists():
            return


def _may_live(content: bytes, seen: float | None, lasts_s: float) -> bool:
    """Return whether a lease counts that no lock proves."""
    if not content:
        return False
    try:
        claim = json.loads(content)
        if claim["machine"] == _this_machine() and not _runs(claim["pid"], claim["token"]):
            return False
        renewed = float(claim["renewed"]) if seen is None else seen
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        # Cut off or damaged.
        return seen is not None and time.time() - seen < lasts_s
    return time.time() - renewed < lasts_s


def _runs(pid: int, token: str) -> bool:
    if pid == os.getpid():
        return token in _own_tokens
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@functools.cache
def _this_machine() -> str:
    """Return what two processes have in common if one can see by its id whether the other runs."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(pathlib.Path("/proc/self/ns/pid").readlink()))  # containers number their own processes
    return " ".join(parts)


def _to_bytes(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode("utf-8")
