"""Asks the storage which checkpoints of an experiment exist: after kills and deletions the log is out of date."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.storage.checkpoint_info import call_in_parallel
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import explain_errors
from det_lightning.experiments.state import Checkpoint, TrialRecord


class CheckpointLookup:
    """Finds the existing checkpoints of an experiment.

    Args:
        place: the storage of the experiment.
        variables: environment variables of the trials, such as credentials of the storage.
    """

    def __init__(self, place: str | dict[str, Any], variables: Mapping[str, str] | None = None) -> None:
        self._place = place
        self._variables = dict(variables or {})

    def open(self) -> CheckpointStorage:
        """Return the storage of the experiment; for errors see ``CheckpointStorage``."""
        return CheckpointStorage(self._place)

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Set the trials' variables during a block that reads or changes the storage."""
        before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value

    def find_existing(self, checkpoints: Iterable[Checkpoint]) -> set[str]:
        """Return the ids of the checkpoints that are complete in their storages.

        Checkpoints in a storage that the trial chose itself and that cannot be read here count as existing. Raise a
        ``StorageError`` if the experiment's storage cannot be read.
        """
        by_place: dict[str | None, list[str]] = {}
        for checkpoint in checkpoints:
            by_place.setdefault(checkpoint.storage, []).append(checkpoint.checkpoint_id)
        found: set[str] = set()
        with self.environment():
            if None in by_place:
                found.update(_filter_complete(self.open(), by_place.pop(None)))
            for place, ids in by_place.items():
                try:
                    found.update(_filter_complete(CheckpointStorage(place), ids))
                except (errors.StorageError, ValueError):
                    found.update(ids)
        return found

    def find_newest(self, trial: TrialRecord) -> Checkpoint | None:
        """Return the newest existing checkpoint of a trial; None if there is none.

        Raise a ``StorageError`` if the storage cannot be read, or is no directory although the trial has written there.
        """
        newest_first = sorted(trial.checkpoints.values(), key=lambda one: (one.steps_completed, one.time), reverse=True)
        for checkpoint in newest_first:
            if self.find_existing([checkpoint]):
                return checkpoint
        newest = next((one for one in newest_first if one.storage is None), None)
        if newest is None or not newest.is_announced:
            return newest  # logs of earlier releases do not say whether a checkpoint is in another storage
        with self.environment():
            _require_directory(self.open(), newest)
        return None


def _filter_complete(storage: CheckpointStorage, ids: list[str]) -> list[str]:
    are_complete = call_in_parallel(storage.root, storage.is_complete, ids)
    return [one for one, is_complete in zip(ids, are_complete, strict=True) if is_complete]


def _require_directory(storage: CheckpointStorage, newest: Checkpoint) -> None:
    """Raise a ``StorageError`` if the whole storage is gone; a bucket without objects is only empty."""
    with explain_errors("looking for", storage.root):
        exists = storage.root.exists()
    if not exists and not storage.root.is_object_store:
        raise errors.StorageError(
            f"{storage} does not exist, but trial {newest.trial_id} has written checkpoints there, the newest, "
            f"{newest.checkpoint_id}, after {newest.steps_completed} batches. Mount or restore the directory. To begin "
            "without these checkpoints, create it empty."
        )
