"""Loaders whose workers end with the run."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch.utils.data import dataloader


class RunLoader:
    """A loader over one run, whose workers end with :meth:`close`.

    Persistent workers that were there before the run belong to whoever started them, and live on.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batches: Iterator[Any] = iter(())
        self._is_shared = _persistent_workers(loader) is not None

    def begin(self) -> Iterator[Any]:
        """Return a new iterator over the batches, which is also :attr:`batches`."""
        self.batches = iter(self.loader)
        return self.batches

    def close(self) -> None:
        """End the workers. A loader of torch can be iterated again; any other is let go of, and ends its own."""
        batches = self.batches
        self.batches = iter(())
        if isinstance(batches, types.GeneratorType):
            batches.close()
        if not isinstance(self.loader, dataloader.DataLoader):
            self.loader = None
        elif not self._is_shared:
            _end_workers(batches)
            _end_workers(_persistent_workers(self.loader))
            self.loader._iterator = None


def _persistent_workers(loader: Any) -> Any:
    """Return torch's iterator over a loader whose workers are persistent; None before the first pass."""
    return getattr(loader, "_iterator", None)


def _end_workers(batches: Any) -> None:
    if isinstance(batches, dataloader._MultiProcessingDataLoaderIter):
        batches._shutdown_workers()  # otherwise done once nothing refers to it, such as the traceback of an error
