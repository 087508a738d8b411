"""Loading batches and zeroing gradients as torch does, but without labels for a profiler that does not run.

torch sets a label (``torch.profiler.record_function``) for every batch and every ``zero_grad()`` whether or not a
profiler runs, which takes longer than everything else that a training adds to a batch here. While one runs, the labels
are set, so traces stay the same. The results and the order of random numbers are torch's in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import _profiler_enabled as profiler_enabled  # type: ignore[attr-defined]  # no public name
from torch.utils import data

__all__ = ["batches_of", "zero_grad"]

_LABEL = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
_TORCHS_ZERO_GRAD = torch.optim.Optimizer.zero_grad


def zero_grad(optimizer: torch.optim.Optimizer) -> None:
    """Call ``optimizer.zero_grad()``; or do the same, if that is torch's own method."""
    is_torchs = type(optimizer).zero_grad is _TORCHS_ZERO_GRAD and "zero_grad" not in vars(optimizer)
    if not is_torchs or profiler_enabled():
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def batches_of(loader: Any) -> Iterator[Any]:
    """Return an iterator over ``loader``; without workers it is not torch's own."""
    if not _loads_here(loader):
        return iter(loader)
    indices = iter(loader.batch_sampler)
    # For each pass, torch draws a seed for the workers, even if there are none.
    iter(data.DataLoader((), batch_sampler=(), generator=loader.generator))  # type: ignore[arg-type]
    return map(_loading(loader.dataset, loader.collate_fn), indices)


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


def _loading(dataset: Any, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that loads the batch of the given indices."""
    get_items = getattr(dataset, "__getitems__", None)

    def load(indices: Any) -> Any:
        return collate(get_items(indices) if get_items else [dataset[index] for index in indices])

    def load_labelled(indices: Any) -> Any:
        if not profiler_enabled():
            return load(indices)
        with torch.profiler.record_function(_LABEL):
            return load(indices)

    return load_labelled
