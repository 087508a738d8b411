"""One writer per trial: a run, or a pruning, holds a lock on the trial's name, where the storage has locks.

The lock is an empty file beside the checkpoints of a local disk, and ends with the process; a file next to it says who
holds the lock. Object stores, SFTP and disks without locks have no such protection.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import uuid
from pathlib import Path

from det_lightning import errors
from det_lightning.checkpoint.storage.location import Location, explain_errors
from det_lightning.checkpoint.storage.staging import remove_if_empty
from det_lightning.escaping import get_logger
from det_lightning.files.local_files import LockedFile, is_locked, lock_file, write_whole

logger = get_logger(__name__)

_DIRECTORY = "trials"
_TRIAL_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_UNPROTECTED = "two runs that train one trial at the same time are not told apart"
# How long a run waits for the lock: a pruning deletes the checkpoints of a trial in less.
_WAIT_S = 5.0


def is_trial_name(name: str) -> bool:
    """Return whether a trial may have this name: letters, digits, ``._-``, at most 128, and no leading dot."""
    return _TRIAL_NAME.fullmatch(name) is not None and not name.startswith(".")


class TrialLock:
    """The right to write and delete the checkpoints of a trial in a storage, until :meth:`release`.

    ``lock`` and ``holder`` are the locked file and the file with the name of the holder; None without locks.
    """

    def __init__(self, lock: LockedFile | None = None, holder: Path | None = None) -> None:
        self._lock = lock
        self._holder = holder

    @classmethod
    def take(cls, root: Location, experiment: str, trial: str, wait_s: float = 0.1) -> TrialLock | None:
        """Return the lock, or None if another process has held the lock for ``wait_s``."""
        if not root.is_local:
            return cls()
        path = _path(root, experiment, trial)
        lock = lock_file(path, unprotected=_UNPROTECTED, wait_s=wait_s)
        if lock is None:
            return None
        taken = cls(lock, path.with_suffix(".json"))
        try:
            write_whole(path.with_suffix(".json"), json.dumps([os.getpid(), socket.gethostname()]).encode())
        except OSError:
            taken.release()
            raise
        return taken

    def release(self) -> None:
        """Release the lock; a second call has no effect."""
        lock, self._lock = self._lock, None
        if lock is None or self._holder is None:
            return
        try:
            self._holder.unlink(missing_ok=True)
            lock.remove()
            remove_if_empty(lock.path.parent)
        except OSError as e:  # of a disk that fails, which must not hide what the run has ended with
            logger.warning("The lock %s cannot be removed: %s", lock.path, e)
            lock.release()


def remove_dead_locks(root: Location) -> None:
    """Remove the lock files of killed runs, whose locks ended with their processes."""
    if not root.is_local:
        return
    folder = root.bookkeeping(_DIRECTORY).local_path
    for path in folder.glob("*.lock"):
        with contextlib.suppress(OSError):  # another user's, or just removed
            if is_locked(path) is False and (lock := lock_file(path)) is not None:
                TrialLock(lock, path.with_suffix(".json")).release()


def is_trial_live(root: Location, experiment: str, trial: str) -> bool:
    """Return whether a live run is known to write the checkpoints of a trial."""
    try:
        return root.is_local and is_locked(_path(root, experiment, trial)) is True
    except FileNotFoundError:
        return False


def lock_trial(root: Location, experiment: str | None, given: str | None, inherited: object) -> tuple[str, TrialLock]:
    """Return the name of a run's trial and its lock: ``given`` if not None, or ``inherited``, or a new name.

    Without ``experiment``, the name of the experiment is the trial's. Raise a ``StorageError`` if a live run has the
    name ``given``; if a live run has ``inherited``, use a new name.
    """
    if given is not None:
        lock = _take(root, experiment or given, given)
        if isinstance(lock, str):
            raise errors.StorageError(
                f"Trial {given!r} in {root} belongs to another run, {lock}. Wait for the end of that run, or pass "
                "another name: trial=..."
            )
        return given, lock
    if isinstance(inherited, str) and is_trial_name(inherited):
        lock = _take(root, experiment or inherited, inherited)
        if isinstance(lock, TrialLock):
            return inherited, lock
        logger.warning(
            "The trial %s that this run resumes belongs to another run, %s. This run becomes a new trial.",
            inherited,
            lock,
        )
    name = str(uuid.uuid4())
    with explain_errors("locking a trial in", root):
        return name, TrialLock.take(root, experiment or name, name) or TrialLock()


def _take(root: Location, experiment: str, trial: str) -> TrialLock | str:
    """Return the lock, or a description of the process that holds it."""
    try:
        with explain_errors("locking a trial in", root):
            lock = TrialLock.take(root, experiment, trial, _WAIT_S)
            return lock or _describe_holder(_path(root, experiment, trial).with_suffix(".json"))
    except errors.StorageError as e:
        if isinstance(e.__cause__, PermissionError):
            return f"that of another user, whose lock cannot be opened: {e.__cause__}"
        raise


def _describe_holder(file: Path) -> str:
    try:
        *_, pid, host = json.loads(file.read_bytes())
        return f"process {int(pid)} on {str(host)!r:.100}"
    except (OSError, ValueError, TypeError):
        return "an unknown process"


def _path(root: Location, experiment: str, trial: str) -> Path:
    # The names themselves need not be valid file names.
    digest = hashlib.sha256(json.dumps([experiment, trial]).encode()).hexdigest()[:32]
    return root.bookkeeping(_DIRECTORY, f"{digest}.lock").local_path
