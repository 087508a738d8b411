"""A storage in memory, for tests."""

from __future__ import annotations

import uuid

import fsspec

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
        self._url = f"memory://det_lightning-{uuid.uuid4()}"
        super().__init__(self._url)

    def clear(self) -> None:
        """Remove all checkpoints."""
        file_system, path = fsspec.core.url_to_fs(self._url)
        if file_system.exists(path):
            file_system.rm(path, recursive=True)

    def __enter__(self) -> InMemoryStorage:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
