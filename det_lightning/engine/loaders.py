"""Loaders of a run: iterators whose workers end with the run, the view for callbacks, and copies ahead to a GPU."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import _profiler_enabled as profiler_enabled  # type: ignore[attr-defined]  # no public name
from torch.utils import data
from torch.utils.data import _DatasetKind, dataloader

from det_lightning.checkpoint.storage.writing import iterate_tensors
from det_lightning.pytorch._data import DataLoader
from det_lightning.pytorch._random_state import Stateful, capture_rng, copy_sampling, isolated_rng, restore_rng

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


class ShownLoader(data.DataLoader[Any]):
    """A loader for callbacks: it has the attributes of the run's loader, but iterating over it leaves the run alone.

    The passes draw from copies of the loader's samplers and generators, and from global random states of their own.
    They have workers of their own. The data set itself is shared.

    Args:
        loader: the loader that the trial built, or the data that ``fit`` was given.
        length: the number of batches, or None if it is unknown.
        num_replicas, rank: a pass over a ``det_lightning.pytorch.DataLoader`` is the share of this rank.
    """

    def __init__(self, loader: Any, length: int | None, num_replicas: int = 1, rank: int = 0) -> None:
        # Torch's __init__ would build samplers: the attributes come from the loader.
        self._loader = loader
        self._length = length
        self._share = num_replicas, rank
        # Now, when the ranks are in the same states: their shares of a pass then have no sample in common.
        self._apart = copy_sampling(loader) if isinstance(loader, DataLoader | data.DataLoader) else loader
        self._rng = capture_rng()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}.")
        return getattr(self._loader, name)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length.")
        return self._length

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = None
        while True:
            with isolated_rng():
                restore_rng(self._rng)
                try:
                    batches = self._begin() if batches is None else batches
                    batch = next(batches)
                except StopIteration:
                    return
                finally:
                    self._rng = capture_rng()
            yield batch

    def drop(self) -> None:
        """Let go of the loader, which ends its own workers once nothing refers to it."""
        self._loader = self._apart = None

    def _begin(self) -> Iterator[Any]:
        apart = self._apart
        if isinstance(apart, DataLoader):
            replicas, rank = self._share
            apart = apart.get_data_loader(repeat=False, skip=0, num_replicas=replicas, rank=rank)
        elif isinstance(apart, Stateful) and not isinstance(apart, data.DataLoader):
            apart = copy.copy(apart)  # its position is often a number among its attributes
        return iter(apart)


class SideStream:
    """A CUDA stream for the copies to one device, in parallel with the device's work. The host waits for no copy.

    A *mark* is a point in the order of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """Return a mark at the end of the work submitted so far."""
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, move: Callable[[Any], Any], batch: Any, after: Any) -> tuple[Any, Any]:
        """Begin ``move(batch)`` when the work reaches the mark ``after``; return the result, and a mark at the end."""
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            moved = move(batch)
        return moved, self._stream.record_event()

    def hand_over(self, moved: Any, end: Any) -> None:
        """Let the work submitted from now on wait for the mark ``end``, and then use ``moved``."""
        working = torch.cuda.current_stream(self._device)
        working.wait_event(end)
        for tensor in iterate_tensors(moved):
            if tensor.is_cuda:
                tensor.record_stream(working)  # the memory is not reused before the work is done


def copy_aside(batches: Iterator[Any], move: Callable[[Any], Any], stream: SideStream) -> Iterator[Any]:
    """Yield the results of ``move`` for each batch, copied while the device still works on the previous batch.

    A batch is taken from ``batches`` only on demand, so that random numbers are drawn in the usual order, and a
    checkpoint counts trained batches. By then the host is ahead of the device.
    """
    before = stream.mark()
    for batch in batches:
        # At the mark the memory of the batch before the last is free for this batch.
        moved, end = stream.copy(move, batch, before)
        before = stream.mark()
        stream.hand_over(moved, end)
        yield moved
