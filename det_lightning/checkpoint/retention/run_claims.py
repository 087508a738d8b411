"""Claims of live runs that share a storage, on trial names and checkpoints; cleaning up after dead runs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Container, Iterator
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR
from det_lightning.checkpoint.storage.ancestry import PARENT_KEY, RUN_KEY
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.claims import Claim, is_claimed
from det_lightning.checkpoint.storage.location import Location, explain_errors, is_name
from det_lightning.checkpoint.storage.metadata import count_or_zero, read_metadata, text_or_none
from det_lightning.escaping import get_logger

logger = get_logger(__name__)

_TRIALS_DIR = "runs"
_USES_DIR = "in_use"
_DELETING = "deleting"
# The purpose of a claim on a trial that ends soon, how often a run looks whether it has, and for how long.
_PRUNING = "prune"
_PAUSE_S = 0.5
_MOST_PAUSES = 120
_TRIAL_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def is_trial_name(name: str) -> bool:
    """Return whether a trial may have this name: letters, digits, ``._-``, at most 128, and no leading dot."""
    return _TRIAL_NAME.fullmatch(name) is not None and not name.startswith(".")


class RunClaims:
    """The claims of a run, ``run_id``, until :meth:`release`, which starts another run, or the end of the process."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self._storage = storage
        self._claims: dict[str, Claim] = {}
        self.run_id = str(uuid.uuid4())

    def use(self, path: str | os.PathLike[str]) -> bool:
        """Keep other runs from deleting a checkpoint; return False if the checkpoint is missing or being deleted.

        In another storage than the run's own, this takes a writable directory of det_lightning there; without the
        directory nothing is claimed, and the return value is True.
        """
        checkpoint = Location.parse(path, self._storage.options)
        if checkpoint.path in self._claims:
            return True
        root = checkpoint.parent
        is_own = root.path == self._storage.root.path
        try:
            with explain_errors("looking for", checkpoint):
                if not checkpoint.is_dir():
                    return False
                if not is_own and not (root / BOOKKEEPING_DIR).exists():
                    return True
            file = functools.partial(_use_file, root, checkpoint.name, self.run_id)
            claim = self._storage.retry.call("claiming", lambda: Claim.take(file()), where=checkpoint)
        except errors.StorageError as e:
            if is_own:
                raise
            logger.warning("Other runs may delete %s while this run resumes from the checkpoint: %s", checkpoint, e)
            return True
        if claim is None:
            return True
        with explain_errors("looking for", checkpoint):
            if is_claimed(_use_file(root, checkpoint.name, _DELETING)) or not checkpoint.is_dir():
                claim.release()
                return False
        self._claims[checkpoint.path] = claim
        return True

    def trace_back(self, path: str | os.PathLike[str] | None, parent_id: str | None) -> dict[str, Any]:
        """Return metadata notes on the checkpoint that the run resumes from, and protect the checkpoint.

        ``parent_id``, None if Lightning wrote the checkpoint, may be an earlier checkpoint than ``path``, in the same
        storage.
        """
        if path is None or parent_id is None or not is_name(parent_id):
            return {RUN_KEY: self.run_id}
        parent = Location.parse(path, self._storage.options).parent / parent_id
        self.use(parent.url)
        with explain_errors("reading", parent):
            known = read_metadata(parent)
        steps = count_or_zero(known.get("steps_completed"))
        link = {"checkpoint": parent_id, "run": text_or_none(known.get(RUN_KEY)) or None, "steps_completed": steps}
        return {RUN_KEY: self.run_id, PARENT_KEY: link}

    def claim_trial(self, experiment: str | None, given: str | None, inherited: object) -> str:
        """Return the name of this run's trial: ``given`` if not None, or ``inherited``, or a new name.

        Raise a ``StorageError`` if a live run has the name ``given``; if a live run has ``inherited``, use a new name.
        """
        if given is not None:
            if (holder := self._claim(experiment, given)) is not None:
                raise errors.StorageError(
                    f"Trial {given!r} in {self._storage} belongs to another run, {holder}. Wait for the end of that "
                    "run, or pass another name: trial=..."
                )
            return given
        if isinstance(inherited, str) and is_trial_name(inherited):
            if (holder := self._claim(experiment, inherited)) is None:
                return inherited
            logger.warning(
                "The trial %s that this run resumes belongs to another run, %s. This run becomes a new trial.",
                inherited,
                holder,
            )
        name = str(uuid.uuid4())
        self._claim(experiment, name)
        return name

    def _claim(self, experiment: str | None, trial: str) -> str | None:
        """Claim the name of a trial; if a live run has the name, return a description of that run."""
        file = _trial_file(self._storage.root, experiment or trial, trial)
        for pause in range(_MOST_PAUSES + 1):
            claim = self._storage.retry.call("claiming the name", lambda: Claim.take(file), where=trial)
            if claim is not None:
                self._claims[file.path] = claim
                return None
            if pause == _MOST_PAUSES or _read_holder(file).get("purpose") != _PRUNING:
                break
            time.sleep(_PAUSE_S)
        return _describe_holder(file)

    def are_due(self) -> bool:
        """Return whether :meth:`renew` has anything to do."""
        return any(claim.is_due() for claim in self._claims.values())

    def renew(self) -> None:
        """Renew the claims on storages without locks.

        Raise a ``StorageError`` if another run has taken an expired claim, and may have resumed this run's trial.
        """
        for claim in [claim for claim in self._claims.values() if claim.is_due()]:
            try:
                is_kept = self._storage.retry.call("renewing", claim.renew, where=claim.file)
            except errors.StorageError as e:  # no reason to stop training
                logger.warning("Other runs may believe that this run has ended: %s", e)
                continue
            if not is_kept:
                del self._claims[claim.file.path]
                holder = _describe_holder(claim.file)
                raise errors.StorageError(
                    f"The trial of this run in {self._storage} belongs to another run now, {holder}, because this run "
                    "has not renewed its claim for two hours. Was the machine suspended? Resume from a checkpoint of "
                    "the trial to train it on."
                )

    def release(self) -> None:
        """Release all claims; later claims belong to another run."""
        for claim in self._claims.values():
            try:
                self._storage.retry.call("removing", claim.release, where=claim.file)
            except errors.StorageError as e:
                logger.warning("A claim of this run cannot be removed now: %s", e)
        self._claims.clear()
        self.run_id = str(uuid.uuid4())


def _read_holder(file: Location) -> dict[str, Any]:
    try:
        holder = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _describe_holder(file: Location) -> str:
    holder = _read_holder(file)
    try:
        return f"process {int(holder['pid'])} on {str(holder['host'])!r:.100}"
    except (ValueError, KeyError, TypeError):
        return "an unknown process"


def is_trial_live(root: Location, experiment: str, trial: str) -> bool:
    """Return whether a live run writes the checkpoints of a trial."""
    with explain_errors("looking for runs in", root):
        return is_claimed(_trial_file(root, experiment, trial))


@contextlib.contextmanager
def own_trial(storage: CheckpointStorage, experiment: str, trial: str) -> Iterator[bool]:
    """Own a trial during a block that deletes checkpoints; a starting run waits. Yield False if a live run owns it."""
    file = _trial_file(storage.root, experiment, trial)
    claim = storage.retry.call("claiming the name", lambda: Claim.take(file, _PRUNING), where=trial)
    try:
        yield claim is not None
    finally:
        if claim is not None:
            storage.retry.call("releasing", claim.release, where=trial)


def list_used(root: Location, by_others_than: str | None = None, among: Container[str] | None = None) -> set[str]:
    """Return the ids of the checkpoints from which live runs, other than ``by_others_than``, have resumed.

    With ``among``, look only for these ids, and do not read other files.
    """
    folder = root.bookkeeping(_USES_DIR)
    found = set()
    with explain_errors("looking for runs in", root):
        for name in folder.list_names():
            used, _, run_id = name.removesuffix(".json").rpartition(".")
            if run_id in (_DELETING, by_others_than) or (among is not None and used not in among):
                continue
            if is_claimed(folder / name):
                found.add(used)
    return found


def delete_unless_used(storage: CheckpointStorage, checkpoint_id: str, run_id: str | None = None) -> bool:
    """Remove a checkpoint, unless a live run other than ``run_id`` uses it; return whether it was removed."""
    # A run that begins to use it meanwhile sees that it is being deleted; any earlier use is seen here.
    root = storage.root
    call = functools.partial(storage.retry.call, where=checkpoint_id)
    deleting = call("claiming", lambda: Claim.take(_use_file(root, checkpoint_id, _DELETING)))
    if deleting is None:
        return False
    try:
        if call("looking for runs that use", lambda: list_used(root, run_id, among=[checkpoint_id])):
            return False
        storage.delete(checkpoint_id)
    finally:
        call("releasing", deleting.release)
    return True


def remove_dead_claims(root: Location) -> None:
    """Remove the claims of killed runs."""
    with explain_errors("looking for runs in", root):
        folders = [root.bookkeeping(name) for name in (_USES_DIR, _TRIALS_DIR)]
        for file in [folder / name for folder in folders for name in folder.list_names()]:
            with contextlib.suppress(PermissionError):  # another user's
                _remove_if_dead(file)


def _remove_if_dead(file: Location) -> None:
    if is_claimed(file):  # taking the claim would mean waiting
        return
    if not file.is_local:
        file.remove()
    elif (dead := Claim.take(file)) is not None:
        dead.release()


def remove_remains(storage: CheckpointStorage) -> None:
    """Remove what this user's killed runs have left in a storage; after an interruption, the next run goes on."""
    try:
        if not (storage.is_local or storage.root.is_object_store):
            # A connection such as SFTP's serves one thread at a time.
            options = {**storage.options, "skip_instance_cache": True}
            storage = CheckpointStorage(storage.root.url, options=options, retry=storage.retry)
        remove_dead_claims(storage.root)
        storage.remove_abandoned(own_only=True)
    except errors.StorageError as e:
        logger.warning("The files of killed runs in %s cannot be removed: %s", storage, e)


def _use_file(root: Location, checkpoint_id: str, run_id: str) -> Location:
    return root.bookkeeping(_USES_DIR, f"{checkpoint_id}.{run_id}.json")


def _trial_file(root: Location, experiment: str, trial: str) -> Location:
    # The names themselves need not be valid file names.
    digest = hashlib.sha256(json.dumps([experiment, trial]).encode()).hexdigest()[:32]
    return root.bookkeeping(_TRIALS_DIR) / f"{digest}.json"
