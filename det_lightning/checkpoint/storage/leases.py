"""Claims on what lies in a storage, by processes that live.

On a local disk a claim is a locked file, which ends with its process. Elsewhere it is a file with host, process and
time, which counts until it is removed, its process is known to have ended, or it was not renewed for some time. Two
processes that make such a claim in the same instant may both get it.
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

# How long a claim on a remote storage counts that nobody renews.
_LASTS_S = 2 * 3600.0
_RENEW_AFTER_S = 300.0
_PAUSE_S = 0.02

# Claims of this process, for its id alone may be that of an earlier one.
_own_tokens: set[str] = set()


class Lease:
    """A claim of this process.

    Args:
        file: stands for what is claimed.
        lock: the locked file; None where there are no locks.
        content: what the file tells of the process.
    """

    def __init__(self, file: Location, lock: IO[bytes] | None, content: dict[str, Any]) -> None:
        self.file = file
        self._lock = lock
        self._content = content
        self._renewed = time.monotonic()

    @classmethod
    def take(cls, file: Location, lasts_s: float = _LASTS_S) -> Lease | None:
        """Return a claim on what ``file`` stands for; None if a live process has one.

        Args:
            file: its directories are made.
            lasts_s: how long the claim of another process counts, where there are no locks.

        Raises:
            OSError: the storage refuses, or whatever its file system raises.
        """
        content = _describe_process()
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
        """Return a claim that is held for moments only, once no other process has it.

        Raises:
            StorageError: another one has had it for ``timeout_s`` seconds.
        """
        until = time.monotonic() + timeout_s
        while (lease := cls.take(file, lasts_s=timeout_s)) is None:
            if time.monotonic() > until:
                raise errors.StorageError(
                    f"{file} has been locked for {timeout_s:.0f} s by another process. If there is none, remove it."
                )
            time.sleep(_PAUSE_S if file.is_local else 10 * _PAUSE_S)
        return lease

    def renew(self) -> None:
        """Say that the process lives, if the last time was some minutes ago."""
        if self._lock is None and time.monotonic() - self._renewed > _RENEW_AFTER_S:
            self._renewed = time.monotonic()
            self.file.write(_to_bytes({**self._content, "renewed": time.time()}))

    def release(self) -> None:
        """Give the claim up, and remove the directories that were made for it if nothing else is in them."""
        _own_tokens.discard(self._content["token"])
        if self._lock is None:
            self.file.remove()
        else:
            self.file.local_path.unlink(missing_ok=True)  # before the lock goes: it is ours until then
            self._lock.close()
        if self.file.is_local:
            _remove_empty_parents(self.file.local_path)

    def __enter__(self) -> Lease:
        """Hold the claim for the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give it up."""
        self.release()


def is_claimed(file: Location, lasts_s: float = _LASTS_S) -> bool:
    """Tell whether a live process has a claim; remove what one has left on a local disk that ended without a word.

    Raises:
        OSError: the storage refuses, or whatever its file system raises.
    """
    if file.is_local:
        try:
            lock = _lock_at(file.local_path, create=False)
        except FileNotFoundError:
            return False
        except (_NoLocks, PermissionError):  # or another user's; its age tells
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
    """The system or the file system knows no locks."""


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
        # Its holder removed it before we got the lock.


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
    """Tell whether a claim counts that no lock proves."""
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


def _describe_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "machine": _this_machine(),
        "pid": os.getpid(),
        "token": str(uuid.uuid4()),
        "renewed": time.time(),
    }


@functools.cache
def _this_machine() -> str:
    """Return what two processes have in common that can tell by an id whether the other one runs."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(pathlib.Path("/proc/self/ns/pid").readlink()))  # containers count processes of their own
    return " ".join(parts)


def _to_bytes(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode("utf-8")
