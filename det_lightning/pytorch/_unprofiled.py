"""Loading batches and zeroing gradients as torch does, but without labels for a profiler that does not run.

torch sets a label (``torch.profiler.record_function``) for every batch and every ``zero_grad()`` whether or not a
profiler runs, which takes longer than everything else that a training adds to a batch here. While one runs, the labels
are set, so traces stay the same. The results and the order of random numbers are torch's in any case.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import _profiler_enabled as profiler_enabled  # type: ignore[attr-defined]  # no public name
from torch.utils import data
from torch.utils.data import _DatasetKind

__all__ = ["TORCHS_ZERO_GRAD", "batches_of", "profiler_enabled"]

#: Does nothing but remove gradients, and label that.
TORCHS_ZERO_GRAD = torch.optim.Optimizer.zero_grad

_LABEL = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
_call = functools.partial.__call__  # operator.call of Python 3.11, for partials


def batches_of(loader: Any) -> Iterator[Any]:
    """Return an iterator over ``loader``; without workers it is not torch's own, and runs no code of ours per batch."""
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
        and not loader.timeout  # torch refuses it
        and not loader.pin_memory
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, data.IterableDataset)
        and not isinstance(loader.dataset, pipes)
    )


def _fetch_labelled(fetcher: Any, indices: Any) -> Any:
    with torch.profiler.record_function(_LABEL):
        return fetcher.fetch(indices)
