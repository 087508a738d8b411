"""Removing what killed runs have left in a storage, beside a training that does not wait for it."""

from __future__ import annotations

import logging
import threading

from det_lightning import errors
from det_lightning.checkpoint.retention.run_claims import remove_dead_claims
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.escaping import escape

logger = logging.getLogger(__name__)

# A run without leftovers to remove does not end in the middle of a request.
_LAST_WAIT_S = 1.0


class BackgroundCleaning:
    """Removes, in a thread of its own, what killed runs of this user have left in a storage.

    What an ending process leaves undone, the next one finishes.
    """

    def __init__(self, storage: CheckpointStorage) -> None:
        self._storage = storage
        self._thread = threading.Thread(target=self._clean, name="det_lightning-cleaning", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait for the end, but not for long."""
        self._thread.join(_LAST_WAIT_S)

    def _clean(self) -> None:
        try:
            storage = _with_own_connection(self._storage)
            remove_dead_claims(storage.root)
            storage.remove_abandoned(own_only=True)
        except errors.StorageError as e:
            logger.warning("What killed runs have left in %s stays there: %s", escape(self._storage), e)


def _with_own_connection(storage: CheckpointStorage) -> CheckpointStorage:
    """Return the same storage, usable in another thread: a connection such as SFTP's serves one at a time."""
    if storage.is_local or storage.root.is_object_store:
        return storage
    options = {**storage.options, "skip_instance_cache": True}
    return CheckpointStorage(storage.root.url, options=options, retry=storage.retry)
