"""A storage in memory, for tests."""

from __future__ import annotations

import uuid

from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage


class InMemoryStorage(CheckpointStorage):
    """Stores checkpoints in memory; pass it as ``checkpoint_storage=``, or to ``DeterminedCheckpoint``.

    Each instance starts empty and shares nothing with others. :meth:`clear`, or the end of a ``with`` block, frees its
    memory.

    >>> from det_lightning.testing import InMemoryStorage
    >>> with InMemoryStorage() as storage:
    ...     storage.list_ids()
    []
    """

    def __init__(self) -> None:
        super().__init__(f"memory://det_lightning-{uuid.uuid4()}")

    def clear(self) -> None:
        """Remove all checkpoints."""
        self.root.remove()

    def __enter__(self) -> InMemoryStorage:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
