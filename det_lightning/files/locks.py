"""Locks on local files, which end with the process that holds them, however that ends."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pathlib
import stat

from filelock import FileLock, Timeout

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# What systems and file systems without locks answer.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_MOST_ATTEMPTS = 100
# Another process may hold a lock for a moment, to see whether there is one.
_WAIT_S = 0.1


class NoLocks(Exception):
    """The system or the file system has no locks."""


@dataclasses.dataclass(eq=False)
class LockedFile:
    """A file that this process has locked; ``lock`` is None where there are no locks."""

    path: pathlib.Path
    lock: FileLock | None

    def release(self) -> None:
        """Release the lock and keep the file."""
        if self.lock is not None:
            self.lock.release()

    def remove(self) -> None:
        """Remove the file while the lock protects it, then release the lock."""
        self.path.unlink(missing_ok=True)
        if self.lock is not None:
            self.lock.release()


def lock_file(path: pathlib.Path, content: bytes | None = None) -> LockedFile | None:
    """Lock a file, which is created if necessary, and write ``content`` into it; links are not followed.

    Return None if another process has locked the file. Raise :class:`NoLocks` if the file system has no locks.
    """

    def write(descriptor: int) -> None:
        if content is not None:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, content)

    lock = FileLock(
        path, timeout=_WAIT_S, poll_interval=_WAIT_S / 10, thread_local=False, fallback_to_soft=False, on_acquired=write
    )
    for attempt in range(1, _MOST_ATTEMPTS + 1):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            if path.exists():
                return None  # otherwise its holder has just removed it
        except (FileExistsError, FileNotFoundError):
            # Another process may create the directory, or remove it while it is empty.
            if attempt == _MOST_ATTEMPTS or path.parent.is_file():
                raise
        except NotImplementedError as e:
            raise NoLocks from e
        except OSError as e:
            if e.errno in _NO_LOCKS:
                raise NoLocks from e
            raise
        else:
            return LockedFile(path, lock)
    return None


def lock_new_file(path: pathlib.Path, content: bytes) -> LockedFile:
    """Create a file that no other process wants: it gets its name once it is locked, where there are locks."""
    unnamed = path.with_suffix(".new")
    while True:
        try:
            locked = lock_file(unnamed, content)
        except NoLocks:
            unnamed.write_bytes(content)
            locked = LockedFile(unnamed, None)
        # Until it is locked, another process may look at it, or take it for a dead one's and remove it.
        with contextlib.suppress(FileNotFoundError):
            if locked is not None:
                unnamed.replace(path)
                locked.path = path
                return locked


def is_locked(path: pathlib.Path) -> bool | None:
    """Return whether a process has locked a file, without changing or creating it; None if that cannot be known.

    Raise a ``FileNotFoundError`` if there is no such file, another ``OSError`` if it is a link or cannot be read.
    """
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False
