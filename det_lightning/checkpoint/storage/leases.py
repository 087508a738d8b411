"""Leases: files by which a process claims something in a storage, such as a checkpoint that it writes.

On a local disk the file of a lease is locked; the lock ends with the process, however that ends. Elsewhere it is a file
with host, process and time, which is valid until it is removed, its process is known to have ended, or it has not been
renewed for some time. Two processes that take such a lease at the same instant may both get it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import socket
import time
import uuid
import weakref
from collections.abc import Iterator
from typing import IO, Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR
from det_lightning.checkpoint.storage.location import Location
from det_lightning.checkpoint.storage.metadata import modified

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# How long a lease on a remote storage is valid without being renewed.
_LASTS_S = 2 * 3600.0
_RENEW_AFTER_S = 300.0
# How long a lease is waited for, and believed, that is only held for a moment.
_BRIEFLY_S = 60.0
_PAUSE_S = 0.02
# No checkpoint takes so long to write.
_ABANDONED_AFTER_S = 24 * 3600.0

_MOST_ATTEMPTS = 100
# Far more than a lease needs.
_MAX_BYTES = 64 * 1024

# What reading a truncated or damaged lease file raises.
_DAMAGED = (ValueError, KeyError, TypeError, OverflowError, RecursionError)

# Leases of this process; an earlier process may have had the same process id.
_own_tokens: set[str] = set()
_locked: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


@dataclasses.dataclass(eq=False)
class LockedFile:
    """A local file that this process has locked, where there are locks, until it is removed or the process ends."""

    path: pathlib.Path
    file: IO[bytes]

    def remove(self) -> None:
        """Remove the file, and the directories that were created for it if they are empty."""
        self.path.unlink(missing_ok=True)  # while the lock still protects it
        self.file.close()
        remove_if_empty(self.path.parent)


class Lease:
    """A lease that this process holds; see :meth:`take`. ``lock`` is None where locks are not available."""

    def __init__(self, file: Location, lock: LockedFile | None, content: dict[str, Any]) -> None:
        self.file = file
        self._lock = lock
        self._content = content
        # By a clock that stands still while the machine is suspended, and by one that may be set back.
        self._renewed = (time.monotonic(), time.time())

    @classmethod
    def take(cls, file: Location, lasts_s: float = _LASTS_S) -> Lease | None:
        """Return a lease, or None if a live process holds it; without locks, that is believed for ``lasts_s``."""
        content = new_content()
        if file.is_local:
            with contextlib.suppress(_NoLocks):
                if (lock := _lock_at(file.local_path)) is None:
                    return None
                lock.file.truncate(0)
                lock.file.write(json.dumps(content).encode())
                return cls(file, lock, content)
        if is_claimed(file, lasts_s):
            return None
        file.write(json.dumps(content).encode())
        if _token_in(file) != content["token"]:
            return None
        _own_tokens.add(content["token"])
        return cls(file, None, content)

    def is_due(self) -> bool:
        """Return whether the lease must be renewed to stay valid."""
        steady, adjustable = self._renewed
        passed = max(time.monotonic() - steady, time.time() - adjustable)
        return self._lock is None and passed > _RENEW_AFTER_S

    def renew(self) -> bool:
        """Write the current time; return False if the lease has expired and another process has taken it."""
        self._renewed = (time.monotonic(), time.time())
        if _token_in(self.file) not in (None, self._content["token"]):
            return False
        self.file.write(json.dumps({**self._content, "renewed": time.time()}).encode())
        return True

    def release(self) -> None:
        """Release the lease, and remove the directories that were created for it if they are empty."""
        _own_tokens.discard(self._content["token"])
        if self._lock is not None:
            self._lock.remove()
            return
        if not self.is_due() or _token_in(self.file) == self._content["token"]:  # it may have expired
            self.file.remove()
        if self.file.is_local:
            remove_if_empty(self.file.local_path.parent)


@contextlib.contextmanager
def briefly_held(file: Location) -> Iterator[None]:
    """Hold a lease for the duration of a short block, once no other process has it."""
    until = time.monotonic() + _BRIEFLY_S
    while (lease := Lease.take(file, lasts_s=_BRIEFLY_S)) is None:
        if time.monotonic() > until:
            raise errors.StorageError(
                f"{file} has been locked for {_BRIEFLY_S:.0f} s by another process. If there is none, remove it."
            )
        time.sleep(_PAUSE_S if file.is_local else 10 * _PAUSE_S)
    try:
        yield
    finally:
        lease.release()


def new_content() -> dict[str, Any]:
    """Return the content of a new lease's file; earlier releases read ``started`` in the lease of a checkpoint."""
    now = time.time()
    return {
        "host": socket.gethostname(),
        "machine": _this_machine(),
        "pid": os.getpid(),
        "token": str(uuid.uuid4()),
        "renewed": now,
        "started": now,
    }


def is_claimed(file: Location, lasts_s: float = _LASTS_S) -> bool:
    """Return whether a live process holds a lease; on a local disk, remove one whose process has ended."""
    if file.is_local:
        try:
            lock = _lock_at(file.local_path, create=False)
        except FileNotFoundError:
            return False
        except (_NoLocks, PermissionError):  # it may be another user's: its age decides
            pass
        else:
            if lock is not None:
                lock.remove()
            return lock is None
    try:
        content = _read(file)
        seen = modified(file)
    except FileNotFoundError:
        return False
    if not content:
        return False
    try:
        claim = json.loads(content)
        if claim["machine"] == _this_machine() and not _runs(claim["pid"], claim["token"]):
            return False
        renewed = float(claim["renewed"]) if seen is None else seen
    except _DAMAGED:
        return seen is not None and time.time() - seen < lasts_s
    return time.time() - renewed < lasts_s


def is_abandoned(mark: Location) -> bool:
    """Return whether the process that marked a checkpoint as being written is known to have ended."""
    try:
        if mark.is_local:
            with _open(mark.local_path, create=False) as file:
                lock_taken = try_to_lock(file)
            if lock_taken is not None:
                return lock_taken
        age_s = time.time() - float(json.loads(_read(mark))["started"])
    except (FileNotFoundError, PermissionError, IsADirectoryError, *_DAMAGED):  # finished, another user's, or no mark
        return False
    return math.isfinite(age_s) and age_s > _ABANDONED_AFTER_S


def _token_in(file: Location) -> object:
    """Return the token in the file of a lease; None if another process has removed or damaged it."""
    try:
        return json.loads(_read(file))["token"]
    except (FileNotFoundError, *_DAMAGED):
        return None


def _read(file: Location) -> bytes:
    try:
        return file.read(_MAX_BYTES)
    except ValueError as e:
        raise ValueError(f"{e}. It is not a lease that det_lightning wrote: remove it") from e


class _NoLocks(Exception):
    """The system or the file system has no locks."""


def lock_new_file(path: pathlib.Path) -> LockedFile:
    """Return a new file at a path that no other process wants; it is locked before it gets its name."""
    unnamed = path.with_suffix(".new")
    content = json.dumps(new_content()).encode()
    while True:
        file = _open(unnamed, flags=os.O_TRUNC)
        try:
            file.write(content)
            if try_to_lock(file) is not False:
                unnamed.replace(path)
                return LockedFile(path, file)
        except FileNotFoundError:
            pass
        except BaseException:
            unnamed.unlink(missing_ok=True)
            file.close()
            raise
        file.close()  # another run took it for abandoned before it was locked


def _lock_at(path: pathlib.Path, create: bool = True) -> LockedFile | None:
    """Return the file at a path, locked; None if another process has locked it."""
    while True:
        file = _open(path, create)
        locked = try_to_lock(file)
        with contextlib.suppress(FileNotFoundError):
            if locked and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return LockedFile(path, file)
        file.close()
        if locked is None:
            raise _NoLocks
        if not locked:
            return None
        # Its holder removed the file before it was locked here.


def _open(path: pathlib.Path, create: bool = True, flags: int = 0) -> IO[bytes]:
    """Open a file for reading and writing, but not through a link."""
    flags |= os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | (os.O_CREAT if create else 0)
    attempts = 0
    while True:
        attempts += 1
        try:
            if create:
                path.parent.mkdir(parents=True, exist_ok=True)
            return os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
        except (FileExistsError, FileNotFoundError):
            # Other processes may create the directory, or remove it while it is empty.
            if not create or attempts == _MOST_ATTEMPTS or path.parent.is_file():
                raise


def try_to_lock(file: IO[bytes]) -> bool | None:
    """Lock a file until it is closed or the process ends; return False if something else has the lock.

    Return None if the system, or the file system, has no locks. Forked processes do not inherit the lock: a loader's
    worker that outlives its parent by some seconds must not lock out the next run.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    _locked.add(file)
    return True


def _leave_to_parent() -> None:
    """Point the descriptors of inherited locks elsewhere; once closed, their file objects could close other files."""
    files = [file for file in _locked if not file.closed]
    _locked.clear()
    if not files:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in files:
        os.dup2(nothing, file.fileno(), inheritable=False)
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def remove_if_empty(folder: pathlib.Path) -> None:
    """Remove a directory in the bookkeeping, and its parents up to the bookkeeping directory, if they are empty."""
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
def _this_machine() -> str:
    """Return what two processes have in common if each can tell from the other's id whether it is running."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(pathlib.Path("/proc/self/ns/pid").readlink()))  # containers number their own processes
    return " ".join(parts)
