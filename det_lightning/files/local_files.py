"""Local files: written whole or not at all, private to their owner, and locked for as long as a process lives."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import pathlib
import stat
import uuid
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

from det_lightning.escaping import get_logger
from det_lightning.files.file_kinds import is_of_shell

if TYPE_CHECKING:
    from filelock import FileLock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = get_logger(__name__)

_PRIVATE = 0o600
#: The answers of systems and file systems without locks.
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_MOST_ATTEMPTS = 100
# Another process may hold a lock for a moment, to see whether there is one.
_WAIT_S = 0.1


def write_whole(
    path: pathlib.Path, content: bytes, *, mode: int = 0o666, sync: bool = False, keeps_mode: bool = False
) -> None:
    """Write a file completely or not at all, in a directory that is created if necessary; an OSError names the file.

    The umask applies to ``mode``. With ``sync``, wait until the content is on the disk. With ``keeps_mode``, the file
    that is replaced passes on its mode and, where permitted, its owner.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another container that writes this file may have the same process id.
    draft = path.with_name(f".{path.name[:50]}.{uuid.uuid4().hex}.tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        if keeps_mode:
            copy_mode(path, draft)
        draft.replace(path)
    except BaseException as e:
        with contextlib.suppress(OSError):  # the directory may have gone
            draft.unlink(missing_ok=True)
        if isinstance(e, OSError) and e.errno is not None:
            raise OSError(e.errno, e.strerror, str(path)) from e
        raise


def copy_mode(old: pathlib.Path, new: pathlib.Path) -> None:
    """Give a new file the mode and, where permitted, the owner of the file that it will replace, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        status = old.lstat()
        if hasattr(os, "chown"):
            with contextlib.suppress(PermissionError):
                os.chown(new, status.st_uid, status.st_gid)
        new.chmod(stat.S_IMODE(status.st_mode))


def write_output(path: str | os.PathLike[str], text: str) -> None:
    """Write a text to a file that a user has named, completely or not at all; an OSError names the file.

    The target of a link is replaced; pipes and devices are written to. Text that UTF-8 cannot hold is escaped.
    """
    content = text.encode("utf-8", "backslashreplace")
    file = pathlib.Path(path)
    if is_of_shell(path) or (file.exists() and not file.is_file()):
        file.write_bytes(content)
    else:
        write_whole(pathlib.Path(os.path.realpath(path)), content, keeps_mode=True)


def write_private(path: pathlib.Path, content: str | bytes) -> None:
    """Write a file completely or not at all; only its owner may read it, whatever the umask."""
    write_whole(path, content.encode() if isinstance(content, str) else content, mode=_PRIVATE)


def open_private(path: pathlib.Path, mode: str) -> IO[Any]:
    """Open a file like ``open``; only the owner may read a file that this creates."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, _PRIVATE))


def make_private(paths: Iterable[pathlib.Path]) -> None:
    """Make files of an earlier release readable by their owner only; skip missing files and those of other users."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            path.chmod(_PRIVATE)


class NoLocks(Exception):
    """The system or the file system has no locks."""


@functools.cache
def warn_of_no_locks(place: str, unprotected: str) -> None:
    """Warn, once per process, that a directory or storage has no file locks, and what that means.

    This is the rule for every lock of the product: without locks, everything works without their protection.
    """
    logger.warning("%s has no file locks: %s.", place, unprotected)


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
        """Remove the file while it is locked, then release the lock."""
        self.path.unlink(missing_ok=True)
        if self.lock is not None:
            self.lock.release()


def lock_file(
    path: pathlib.Path, content: bytes | None = None, *, unprotected: str | None = None, wait_s: float = _WAIT_S
) -> LockedFile | None:
    """Lock a file, created if necessary, and write ``content``; links are not followed.

    Return None if another process has locked the file for ``wait_s``; -1 waits without end. If the file system has no
    locks, write the file all the same and warn of the ``unprotected``; without ``unprotected``, raise :class:`NoLocks`.
    """

    def write(descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, content or b"")

    from filelock import FileLock, Timeout  # here, because most commands lock nothing

    lock = FileLock(
        path,
        timeout=wait_s,
        poll_interval=_WAIT_S / 10,
        thread_local=False,
        fallback_to_soft=False,
        on_acquired=None if content is None else write,
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
            if not isinstance(e, NotImplementedError) and e.errno not in NO_LOCKS:
                raise
            if unprotected is None:
                raise NoLocks from e
            warn_of_no_locks(str(path.parent), unprotected)
            write_whole(path, content or b"")
            return LockedFile(path, None)
        else:
            return LockedFile(path, lock)
    return None


def lock_new_file(path: pathlib.Path) -> LockedFile:
    """Create an empty file with a unique name; where there are locks, it is locked before it gets the name."""
    unnamed = path.with_suffix(".new")
    while True:
        try:
            locked = lock_file(unnamed)
        except NoLocks:
            unnamed.touch()
            locked = LockedFile(unnamed, None)
        # Before the lock, another process may look at the file, or remove the file as a dead process's.
        with contextlib.suppress(FileNotFoundError):
            if locked is not None:
                unnamed.replace(path)
                locked.path = path
                return locked


def is_locked(path: pathlib.Path) -> bool | None:
    """Return whether a process has locked a file, without changing or creating it; None if unknown.

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
