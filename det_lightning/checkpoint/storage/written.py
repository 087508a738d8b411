"""The checkpoints that a run has written, and whether they are still there."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from det_lightning import errors
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage

__all__ = ["WrittenCheckpoints"]

logger = logging.getLogger("det_lightning.checkpoint")


class WrittenCheckpoints:
    """Remembers what a run has written and not deleted, and looks for it.

    Args:
        storage: where it was written to.
    """

    def __init__(self, storage: CheckpointStorage) -> None:
        self._storage = storage
        self._there: list[str] = []
        self._vanished: list[str] = []

    def add(self, checkpoint_id: str) -> None:
        """Remember a complete checkpoint."""
        self._there.append(checkpoint_id)

    def discard(self, checkpoint_ids: Iterable[str]) -> None:
        """Forget what the run itself has deleted."""
        deleted = set(checkpoint_ids)
        self._there = [checkpoint_id for checkpoint_id in self._there if checkpoint_id not in deleted]

    def look(self) -> None:
        """Log an error that names what has vanished since the last time. The training need not end for that.

        Raises:
            StorageError: the storage can not be read.
        """
        gone = self._storage.find_missing(self._there)
        if gone:
            self.discard(gone)
            self._vanished += gone
            logger.error("%s", _describe(gone, self._storage))

    def require_all(self) -> None:
        """Look for the last time.

        Raises:
            StorageError: checkpoints have vanished during the run; names all of them.
        """
        self.look()
        vanished, self._vanished = self._vanished, []
        self._there = []
        if vanished:
            raise errors.StorageError(_describe(vanished, self._storage))


def _describe(checkpoint_ids: list[str], storage: CheckpointStorage) -> str:
    return (
        f"{len(checkpoint_ids)} checkpoints that this run has written to {storage} are not there any more: "
        f"{', '.join(checkpoint_ids)}. Was the storage removed or unmounted, or were they deleted by hand? Retention "
        "deletes what need not be kept, and `det-lightning checkpoint prune` what a run has left that is over."
    )
