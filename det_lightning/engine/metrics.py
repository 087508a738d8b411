"""The metrics of a window of batches: collected on their device, converted together, averaged and reduced."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from det_lightning import errors
from det_lightning.core._distributed import DistributedContext
from det_lightning.core._metrics import as_float
from det_lightning.distributed.rank_means import mean_over_ranks, means_device
from det_lightning.engine.plain_window import PlainWindow
from det_lightning.pytorch._reducer import Reducer, simple_reduce

_NUMPY_TYPES = {
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.bool: np.bool_,
}


class MetricWindow:
    """The metrics of the batches since the last boundary.

    A tensor counts with the value that it has when it is added. On the CPU it is converted at once; on an accelerator
    it stays there, so that no batch waits for the device, and :meth:`close` transfers all of them together. If it
    ``keeps_latest``, the metrics of the latest batch are there as they were added, until they are taken.
    """

    def __init__(self) -> None:
        self._batches: list[dict[str, Any]] = []
        self._on_device = False
        self._sums: dict[str, tuple[Any, int]] = {}
        self._summed = 0
        self.keeps_latest = False
        self._latest: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, metrics: dict[str, Any]) -> None:
        """Add the metrics of one batch."""
        kept = {}
        for name, value in metrics.items():
            # Looks at the type first: a call for each metric of each batch is most of what this costs.
            if type(value) is torch.Tensor or isinstance(value, torch.Tensor):
                if not value.is_cpu or value.dtype not in _NUMPY_TYPES:
                    value = value.detach().clone()
                    self._on_device = True
                elif value.ndim == 0:
                    # Several times faster than a detached copy.
                    value = np.array(value.item(), _NUMPY_TYPES[value.dtype])
                else:
                    value = value.detach().numpy().copy()
            kept[name] = value
        self._batches.append(kept)
        if self.keeps_latest:
            self._latest = metrics

    def take_latest(self) -> dict[str, Any] | None:
        """Return the metrics that were added last, and forget them; None if there are none to take."""
        latest = self._latest
        self._latest = None
        return latest

    def means(self) -> dict[str, torch.Tensor]:
        """Return the mean of each scalar metric up to now: float64, of shape ``()``, on the device of the metric."""
        number: float | torch.Tensor | None
        for batch in self._batches[self._summed :]:
            for name, value in batch.items():
                if isinstance(value, torch.Tensor):
                    number = value.double() if value.ndim == 0 and not value.is_complex() else None
                else:
                    number = as_float(value)
                if number is not None:
                    total, count = self._sums.get(name, (0.0, 0))
                    self._sums[name] = (total + number, count + 1)
        self._summed = len(self._batches)
        return {
            name: torch.as_tensor(total / count, dtype=torch.float64) for name, (total, count) in self._sums.items()
        }

    def clear(self) -> None:
        """Begin a new window, and forget the metrics of this one."""
        self._batches = []
        self._on_device = False
        self._sums = {}
        self._summed = 0
        self._latest = None

    def close(self) -> list[dict[str, Any]]:
        """Return the metrics of each batch, tensors as numpy values, and begin a new window."""
        batches = self._batches
        on_device = self._on_device
        self.clear()
        return _transfer(batches) if on_device else batches


def _transfer(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert tensors to numpy values, with one transfer for all of a device, as bytes."""
    kinds: dict[tuple[Any, ...], list[tuple[dict[str, Any], str]]] = {}
    for batch in batches:
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                kinds.setdefault((value.device, value.dtype, value.shape), []).append((batch, name))
    by_device: dict[torch.device, list[tuple[torch.Tensor, list[tuple[dict[str, Any], str]]]]] = {}
    for (device, dtype, _), entries in kinds.items():
        stacked = torch.stack([batch[name] for batch, name in entries])
        stacked = stacked.float() if dtype is torch.bfloat16 else stacked
        by_device.setdefault(device, []).append((stacked, entries))
    for stacks in by_device.values():
        for values, (_, entries) in zip(_bring_together([stacked for stacked, _ in stacks]), stacks, strict=True):
            for index, (batch, name) in enumerate(entries):
                batch[name] = np.array(values[index])
    return batches


def _bring_together(tensors: list[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
    """Return the values of tensors of one device, brought over together."""
    if len(tensors) == 1:
        return [tensors[0].cpu().numpy()]
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    brought = torch.split(torch.cat(flat).cpu(), [len(part) for part in flat])
    return [
        part.clone().view(tensor.dtype).view(tensor.shape).numpy()
        for part, tensor in zip(brought, tensors, strict=True)
    ]


def to_numpy(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics, tensors as numpy values."""
    window = MetricWindow()
    window.add(metrics)
    return window.close()[0]


def average_metrics(batches: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the mean of each metric over a window; None for a metric whose values have no mean."""
    names = batches[0].keys() if batches else {}.keys()
    for index, batch in enumerate(batches):
        if batch.keys() != names:
            raise ValueError(
                "train_batch() must return the same metrics for every batch; for batch "
                f"{index} of the workload it returned {sorted(batch)}, for those before {sorted(names)}."
            )
    return {name: _mean([batch[name] for batch in batches]) for name in names}


def _mean(values: list[Any]) -> float | None:
    try:
        array = np.array(values)
        # Where there are only numbers none is missing, and all need not be compared.
        present = array.ravel() if array.dtype.kind in "biuf" else array[array != None]  # noqa: E711 (by element)
        return cast("float", np.mean(present).item())
    except (TypeError, ValueError):
        return None


def average_over_ranks(batches: list[dict[str, Any]], distributed: DistributedContext) -> list[dict[str, Any]]:
    """Return the metrics of each batch of a window, averaged over the ranks."""
    if distributed.size == 1:
        return batches
    device = means_device(distributed)
    window = None if device is None else PlainWindow.of(batches)
    # Small, and the same on all ranks: it shows that all are here, and may take the short way.
    signatures = distributed.allgather(None if window is None else window.signature)
    if window is not None and device is not None and signatures.count(window.signature) == len(signatures):
        return window.with_values(mean_over_ranks(window.values, window.is_single, device))
    per_rank: list[list[dict[str, Any]]] = distributed.allgather(batches)
    first = [list(batch) for batch in per_rank[0]]
    for rank, theirs in enumerate(per_rank):
        names = [list(batch) for batch in theirs]
        if [set(batch) for batch in names] != [set(batch) for batch in first]:
            raise ValueError(
                "train_batch() must return the same metrics on every rank; the batches of the workload have "
                f"{_summary(first)} on rank 0, and {_summary(names)} on rank {rank}."
            )
    return [
        {name: _mean_over_ranks([theirs[index][name] for theirs in per_rank]) for name in names}
        for index, names in enumerate(first)
    ]


def _summary(names: list[list[str]]) -> str:
    return f"{len(names)} times {sorted({name for batch in names for name in batch})}"


def _mean_over_ranks(values: list[Any]) -> Any:
    array = np.array(values)
    mean = np.mean(array[array != None])  # noqa: E711 (element by element)
    return np.array(mean) if isinstance(values[0], np.ndarray) else mean


def reduce_validation_metrics(
    batches: list[dict[str, Any]], reducer: Reducer | dict[str, Reducer], distributed: DistributedContext
) -> dict[str, Any]:
    """Reduce the metrics of a validation over batches and ranks. A rank may have no batches at all."""
    own: dict[str, Any] = {}
    if batches:
        reducers = _reducer_of_each(list(batches[0]), reducer)
        own = {name: _reduce_one(name, reducers[name], [batch[name] for batch in batches]) for name in batches[0]}
    if distributed.size == 1:
        return own
    gathered: list[tuple[dict[str, Any], int]] = distributed.allgather((own, len(batches)))
    names = _names_on_all_ranks([list(metrics) if count else None for metrics, count in gathered])
    reducers = _reducer_of_each(names, reducer)
    per_rank = [metrics for metrics, count in gathered if count]
    counts = [count for _, count in gathered if count]
    return {name: simple_reduce(reducers[name], [metrics[name] for metrics in per_rank], counts) for name in names}


def _names_on_all_ranks(names: list[list[str] | None]) -> list[str]:
    with_batches = {rank: found for rank, found in enumerate(names) if found is not None}
    if not with_batches:
        raise RuntimeError("The validation loader is empty. See build_validation_data_loader().")
    first, expected = next(iter(with_batches.items()))
    for rank, found in with_batches.items():
        if set(found) != set(expected):
            raise ValueError(
                f"evaluate_batch() must return the same metrics on every rank; it returned {sorted(expected)} on rank "
                f"{first}, and {sorted(found)} on rank {rank}."
            )
    return expected


def _reducer_of_each(names: list[str], reducer: Reducer | dict[str, Reducer]) -> dict[str, Reducer]:
    reducers = reducer if isinstance(reducer, dict) else dict.fromkeys(names, reducer)
    if reducers.keys() != set(names):
        raise errors.InvalidExperimentException(
            f"evaluation_reducer() returned reducers for {sorted(reducers)}, but the validation metrics are "
            f"{sorted(names)}. Return one Reducer for all of them, or a dict with exactly these keys."
        )
    wrong = {name: value for name, value in reducers.items() if not isinstance(value, Reducer)}
    if wrong:
        raise errors.InvalidExperimentException(
            f"evaluation_reducer() must return members of det_lightning.pytorch.Reducer; got {wrong}."
        )
    return reducers


def _reduce_one(name: str, reducer: Reducer, values: list[Any]) -> Any:
    try:
        # Of numbers of one type the array has the same values, and takes a fraction of the time.
        stacked = np.array(values) if _single_type(values) else np.stack(values, axis=0)
    except ValueError as e:
        shapes = sorted({np.shape(value) for value in values}, key=str)
        raise ValueError(f"Validation metric {name!r} has another shape for some batches: {shapes}.") from e
    try:
        return simple_reduce(reducer, stacked)
    except (TypeError, ValueError) as e:
        raise TypeError(f"Validation metric {name!r} cannot be reduced by {reducer}: {e}") from e


def _single_type(values: list[Any]) -> bool:
    """Return whether values are numpy arrays of shape ``()`` that hold numbers of the same type."""
    shapes_and_types = {(value.shape, value.dtype) if type(value) is np.ndarray else None for value in values}
    only = shapes_and_types.pop()
    return only is not None and not shapes_and_types and only[0] == () and only[1].kind in "biuf"
