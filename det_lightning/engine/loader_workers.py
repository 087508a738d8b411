"""Iterators over the loaders of a run, whose workers end with the run; without workers, no labels for profilers."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd import _profiler_enabled as profiler_enabled  # type: ignore[attr-defined]  # no public name
from torch.utils import data
from torch.utils.data import _DatasetKind, dataloader

from det_lightning.pytorch._random_state import Stateful

_LABEL = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
_call = functools.partial.__call__  # operator.call of Python 3.11, for partials


class RunLoader:
    """A loader over one run; :meth:`close` ends the workers.

    Persistent workers started before the run belong to the caller, and live on. Each iterator finds the parts in
    ``restarted`` as the first iterator found them.
    """

    def __init__(self, loader: Any, restarted: Sequence[Stateful] = ()) -> None:
        self.loader = loader
        self.batches: Iterator[Any] = iter(())
        self._restarted = restarted
        self._initial: list[Any] = []
        self._is_shared = _find_persistent_workers(loader) is not None

    def begin(self) -> Iterator[Any]:
        """Return a new iterator over the batches, also as :attr:`batches`."""
        for part, state in zip(self._restarted, copy.deepcopy(self._initial), strict=False):
            part.load_state_dict(state)
        self._initial = self._initial or [copy.deepcopy(part.state_dict()) for part in self._restarted]
        self.batches = iterate_batches(self.loader)
        return self.batches

    def close(self) -> None:
        """End the workers. A loader of torch can be iterated again; another loader is dropped, and ends its own."""
        batches = self.batches
        self.batches = iter(())
        if isinstance(batches, types.GeneratorType):
            batches.close()
        if not isinstance(self.loader, dataloader.DataLoader):
            self.loader = None
        elif not self._is_shared:
            _end_workers(batches)
            _end_workers(_find_persistent_workers(self.loader))
            self.loader._iterator = None


def _find_persistent_workers(loader: Any) -> Any:
    """Return torch's iterator over a loader with persistent workers; None before the first pass."""
    return getattr(loader, "_iterator", None)


def _end_workers(batches: Any) -> None:
    if isinstance(batches, dataloader._MultiProcessingDataLoaderIter):
        batches._shutdown_workers()  # otherwise done once nothing, such as a traceback, refers to the iterator


def iterate_batches(loader: Any) -> Iterator[Any]:
    """Return an iterator over ``loader``; without workers a plain one, which runs no code of this package per batch."""
    if not _loads_here(loader):
        return iter(loader)
    indices = iter(loader.batch_sampler)
    # For each pass, torch draws a seed for the workers, even if there are none.
    iter(data.DataLoader((), batch_sampler=(), generator=loader.generator))  # type: ignore[arg-type]
    make_fetcher: Any = _DatasetKind.create_fetcher
    fetcher = make_fetcher(_DatasetKind.Map, loader.dataset, True, loader.collate_fn, loader.drop_last)
    by_profiling = (functools.partial(fetcher.fetch), functools.partial(_fetch_labelled, fetcher))
    is_profiling = iter(profiler_enabled, None)  # asks before each batch, without end
    return map(_call, map(by_profiling.__getitem__, is_profiling), indices)


def _loads_here(loader: Any) -> bool:
    """Return whether nothing but indexing and collating makes a batch of ``loader``."""
    pipes = getattr(data, "MapDataPipe", ())
    return (
        type(loader) is data.DataLoader
        and loader.num_workers == 0
        and not loader.timeout  # torch refuses a timeout
        and not loader.pin_memory
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, data.IterableDataset)
        and not isinstance(loader.dataset, pipes)
    )


def _fetch_labelled(fetcher: Any, indices: Any) -> Any:
    with torch.profiler.record_function(_LABEL):
        return fetcher.fetch(indices)
