"""A trial's checkpoints in a storage: one writer, who deletes what the rule does not keep, and adds metrics later.

A run, or a pruning, holds a lock on the trial's name, where the storage has locks: an empty file beside the checkpoints
of a local disk, whose lock ends with the process. A file next to it says who holds the lock. Object stores, SFTP and
disks without locks have no such protection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import METADATA_FILE, with_entries
from det_lightning.checkpoint.retention.policy import CheckpointPolicy, CheckpointRecord
from det_lightning.checkpoint.storage.checkpoint_info import CheckpointInfo
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import Location, explain_errors
from det_lightning.checkpoint.storage.staging import remove_if_empty
from det_lightning.escaping import get_logger
from det_lightning.files.local_files import LockedFile, is_locked, lock_file, write_whole
from det_lightning.files.strict_json import to_json

logger = get_logger(__name__)

_DIRECTORY = "trials"
_TRIAL_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_UNPROTECTED = "two runs that train one trial at the same time are not told apart"
# How long a run waits for the lock: a pruning deletes the checkpoints of a trial in less.
_WAIT_S = 5.0


def make_record(info: CheckpointInfo, trial: str, metric_name: str | None = None) -> CheckpointRecord:
    """Return a checkpoint's record for the rule; with ``metric_name``, other metrics do not count."""
    notes = info.notes
    counts = metric_name is None or notes.metric_name in (None, metric_name)
    return CheckpointRecord(
        id=info.id,
        trial=trial,
        steps_completed=notes.steps_completed or 0,
        order=info.time or 0.0,
        metric=notes.metric if counts else None,
    )


class TrialCheckpoints:
    """The checkpoints of the trial that a run has locked; no other run adds any or deletes any.

    ``parent`` is the checkpoint that the run resumes from. ``on_delete`` gets the id of each checkpoint that the rule
    has deleted.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        policy: CheckpointPolicy,
        experiment: str = "",
        trial: str = "",
        parent: CheckpointContent | None = None,
        on_delete: Callable[[str], None] | None = None,
    ) -> None:
        self._storage = storage
        self._policy = policy
        self._names = (experiment, trial)
        self._on_delete = on_delete
        self._records: dict[str, CheckpointRecord] = {}
        self._written: list[str] = []  # by this run, and not deleted
        self._parent_id = None if parent is None else parent.name
        self._latest = 0.0 if parent is None else parent.time_s or 0.0

    def learn(self) -> None:
        """Find the checkpoints of earlier runs; none is deleted before this run has written one."""
        own = [
            info
            for info in self._storage.list_checkpoints()
            if (info.notes.experiment, info.notes.trial) == self._names
        ]
        self._records = {info.id: make_record(info, self._names[1], self._policy.metric) for info in own}
        self._latest = max([self._latest, *(record.order for record in self._records.values())])

    def describe_next(self, metric: float | None) -> dict[str, Any]:
        """Return the entries of the next checkpoint's ``metadata.json``: the ``time``, and the ``metric`` if any.

        The time, in seconds since 1970, grows even if the clock is set back.
        """
        time_s = max(time.time(), self._latest + 1e-3)
        if metric is None:
            return {"time": time_s}
        policy = self._policy
        described = {"name": policy.metric, "value": metric, "smaller_is_better": policy.smaller_is_better}
        return {"time": time_s, "metric": described}

    def add(self, checkpoint_id: str, steps_completed: int, order: float, metric: float | None) -> None:
        """Record a complete checkpoint, then delete those that need no longer be kept."""
        self._records[checkpoint_id] = CheckpointRecord(checkpoint_id, self._names[1], steps_completed, order, metric)
        self._latest = order
        self._written.append(checkpoint_id)
        self._delete_the_rest()

    def note_metric(self, steps_completed: int, metric: float) -> None:
        """Note the metric of a validation if the latest checkpoint is at the same batch without a metric.

        Before the run has written a checkpoint, the checkpoint that the run resumed from counts as the latest.
        """
        latest = max(self._records.values(), key=lambda record: record.order, default=None)
        if latest is None or latest.id not in (*self._written, self._parent_id):
            return
        if latest.steps_completed != steps_completed or latest.metric is not None:
            return
        try:
            is_noted = add_metric(self._storage, latest.id, self.describe_next(metric)["metric"])
        except errors.StorageError as e:
            logger.warning("The metric of checkpoint %s cannot be written into the metadata: %s", latest.id, e)
            return
        if is_noted:
            self._records[latest.id] = dataclasses.replace(latest, metric=metric)
            if self._written:
                self._delete_the_rest()

    def _delete_the_rest(self) -> None:
        if self._policy.retention is None:
            return
        for checkpoint_id in self._policy.choose_to_delete(self._records.values()):
            if checkpoint_id == self._parent_id and not self._written:
                continue  # what the run resumed from stays until it has written one
            try:
                self._storage.delete(checkpoint_id)
            except errors.CheckpointNotFound:
                logger.warning("Checkpoint %s was deleted by another process.", checkpoint_id)
            except errors.StorageError as e:
                # The new checkpoint is safe, and training must not fail because an old one could not be deleted.
                logger.warning("An old checkpoint cannot be deleted; the next save tries again: %s", e)
                continue
            del self._records[checkpoint_id]
            self._written = [one for one in self._written if one != checkpoint_id]
            if self._on_delete is not None:
                self._on_delete(checkpoint_id)

    def finish(self) -> None:
        """End the run: delete unneeded checkpoints, and raise a ``StorageError`` that names vanished checkpoints."""
        self._delete_the_rest()
        storage = self._storage
        if not self._written:
            return
        if storage.is_local:
            gone = [name for name in self._written if not storage.is_complete(name)]
        else:  # one listing
            with explain_errors("listing", storage.root):
                there = {*storage.root.list_names()}
            gone = [name for name in self._written if name not in there]
        if gone:
            raise errors.StorageError(
                f"{len(gone)} checkpoints that this run has written to {storage} no longer exist: {', '.join(gone)}. "
                "Was the storage removed or unmounted, or were the checkpoints deleted by hand?"
            )


def add_metric(storage: CheckpointStorage, checkpoint_id: str, metric: dict[str, Any]) -> bool:
    """Add a metric to a checkpoint's metadata; return False if the metadata are gone, damaged, or have a metric."""
    info = storage.info(checkpoint_id)
    if not info.metadata or "metric" in info.metadata:
        return False
    content = to_json(with_entries(info.metadata, {"metric": metric})).encode()
    file = info.directory / METADATA_FILE
    with explain_errors("writing", file):
        file.write(content)
    return True


# One writer


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
