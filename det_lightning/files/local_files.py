"""Local files: written whole or not at all, private to their owner, and locked for as long as a process lives."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pathlib
import stat
import uuid
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from filelock import FileLock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PRIVATE = 0o600
# The answers of systems and file systems without locks.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_MOST_ATTEMPTS = 100
# Another process may hold a lock for a moment, to see whether there is one.
_WAIT_S = 0.1


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


class NoLocks(Exception):
    """The system or the file system has no locks."""


@dataclasses.dataclass(eq=False)
class LockedFile:
    """A file that this process has locked; ``lock`` is None on a system without locks."""

    path: pathlib.Path
    lock: FileLock | None

    def release(self) -> None:
        """Release the lock and keep the file."""
        if self.lock is not None:
            self.lock.release()

    def remove(self) -> None:
        """Remove the file under the protection of the lock, then release the lock."""
        self.path.unlink(missing_ok=True)
        if self.lock is not None:
            self.lock.release()


def lock_file(path: pathlib.Path, content: bytes | None = None) -> LockedFile | None:
    """Lock a file, created if necessary, and write ``content``; links are not followed.

    Return None if another process has locked the file. Raise :class:`NoLocks` if the file system has no locks.
    """

    def write(descriptor: int) -> None:
        if content is not None:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, content)

    from filelock import FileLock, Timeout  # here, because most commands lock nothing

    lock = FileLock(
        path, timeout=_WAIT_S, poll_interval=_WAIT_S / 10, thread_local=False, fallback_to_soft=False, on_acquired=write
    )
    for attempt in range(1, _MOST_ATTEMPTS + 1):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            if path.exists():
                return None  # otherwise the holder has just removed the file
        except (FileExistsError, FileNotFoundError):
            # Another process may create the directory, or remove the empty directory.
            if attempt == _MOST_ATTEMPTS or path.parent.is_file():
                raise
        except (NotImplementedError, OSError) as e:
            if isinstance(e, NotImplementedError) or e.errno in _NO_LOCKS:
                raise NoLocks from e
            raise
        else:
            return LockedFile(path, lock)
    return None


def lock_new_file(path: pathlib.Path, content: bytes) -> LockedFile:
    """Create a file that no other process wants; the file gets its name once locked, where there are locks."""
    unnamed = path.with_suffix(".new")
    while True:
        try:
            locked = lock_file(unnamed, content)
        except NoLocks:
            unnamed.write_bytes(content)
            locked = LockedFile(unnamed, None)
        # Before the lock, another process may look at the file, or remove the file as a dead process's.
        with contextlib.suppress(FileNotFoundError):
            if locked is not None:
                unnamed.replace(path)
                locked.path = path
                return locked


def is_locked(path: pathlib.Path) -> bool | None:
    """Return whether a process has locked a file, without changing or creating the file; None if unknown.

    Raise a ``FileNotFoundError`` if there is no file, another ``OSError`` for a link.
    """
    if fcntl is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except PermissionError:  # another user's
        return None
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except OSError as e:
        return True if isinstance(e, BlockingIOError) else None
    finally:
        os.close(descriptor)
    return None
