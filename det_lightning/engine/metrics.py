"""The metrics of a window or a validation: collected on the device, converted together, averaged or reduced."""

from __future__ import annotations

import functools
import operator
import pickle
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from det_lightning import errors
from det_lightning.core._reports import as_float
from det_lightning.pytorch._reducer import Reducer, simple_reduce
from det_lightning.ranks.distributed_context import DistributedContext

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

    Tensors are recorded with the value they have when added. Values on the CPU are converted at once; values on an
    accelerator stay there until all are copied to the host together, so that no batch waits for the device. With
    ``keeps_latest``, the latest metrics are also kept as added, until :meth:`take_latest`.
    """

    def __init__(self, keeps_latest: bool = False) -> None:
        #: The metrics of each batch, and the dtypes of numbers made of tensors of shape ``()``.
        self._batches: list[tuple[dict[str, Any], dict[str, torch.dtype]]] = []
        self._on_device = False
        self._sums: dict[str, tuple[Any, int]] = {}
        self._summed = 0
        self._keeps_latest = keeps_latest
        self._latest: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, metrics: dict[str, Any]) -> None:
        """Add the metrics of one batch; values on the CPU become arrays in ``metrics`` itself, as with Determined.

        Otherwise a trial that keeps the returned dict would keep the graph of each batch. With ``keeps_latest``,
        Lightning's callbacks get the metrics as the trial returned the dict.
        """
        returns_arrays = not self._keeps_latest and isinstance(metrics, dict)
        kept: dict[str, Any] = {}
        dtypes: dict[str, torch.dtype] = {}
        for name, value in metrics.items():
            # Checks the exact type first: a call for each metric of each batch is most of the cost of this method.
            if not (type(value) is torch.Tensor or isinstance(value, torch.Tensor)):
                kept[name] = value
                continue
            if not value.is_cpu or value.dtype not in _NUMPY_TYPES:
                kept[name] = value.detach().clone()
                self._on_device = True
                continue
            array = value.detach().numpy()
            if returns_arrays:
                metrics[name] = array
            if value.ndim == 0:
                # Several times faster than a copy; closing the window makes an array of the number.
                dtypes[name] = value.dtype
                kept[name] = array.item()
            else:
                # Numpy adds numbers in the order of memory, so the copy keeps the order.
                kept[name] = array.copy(order="K")
        self._batches.append((kept, dtypes))
        if self._keeps_latest:
            self._latest = metrics

    def take_latest(self) -> dict[str, Any] | None:
        """Return the metrics of the latest batch, and forget them; None if there are none."""
        latest = self._latest
        self._latest = None
        return latest

    def means(self) -> dict[str, torch.Tensor]:
        """Return the mean of each scalar metric so far, as float64 of shape ``()`` on the device of the metric."""
        number: float | torch.Tensor | None
        for batch, _ in self._batches[self._summed :]:
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
        """Begin a new window without metrics."""
        self._batches = []
        self._on_device = False
        self._sums = {}
        self._summed = 0
        self._latest = None

    def close(self) -> list[dict[str, Any]]:
        """Return the metrics of each batch, with tensors as numpy values, and begin a new window.

        The values on a device come to the host in one copy for each type and shape, for which the host waits.
        """
        batches = [batch for batch, _ in self._batches]
        for batch, dtypes in self._batches:
            for name in dtypes:
                batch[name] = np.array(batch[name], _NUMPY_TYPES[dtypes[name]])
        if self._on_device:
            _convert_together(batches)
        self.clear()
        return batches


def _convert_together(batches: list[dict[str, Any]]) -> None:
    """Replace the tensors of batches by numpy values, in one copy for each device, type and shape."""
    kinds: dict[tuple[Any, ...], list[tuple[dict[str, Any], str]]] = {}
    for batch in batches:
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                kinds.setdefault((value.device, value.dtype, value.shape), []).append((batch, name))
    for (_, dtype, _), entries in kinds.items():
        stacked = torch.stack([batch[name] for batch, name in entries])
        values = (stacked.float() if dtype is torch.bfloat16 else stacked).cpu().numpy()
        for index, (batch, name) in enumerate(entries):
            batch[name] = np.array(values[index])


def to_numpy(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics, with tensors as numpy values."""
    window = MetricWindow()
    window.add(metrics)
    return window.close()[0]


def average_metrics(batches: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the mean of each metric over a window; None for values without a mean."""
    names = batches[0].keys() if batches else {}.keys()
    for index, batch in enumerate(batches):
        if batch.keys() != names:
            raise ValueError(
                f"train_batch() must return the same metrics for every batch; got {sorted(batch)} for batch {index} of "
                f"the workload, and {sorted(names)} for the batches before."
            )
    return {name: _mean([batch[name] for batch in batches]) for name in names}


def _mean(values: list[Any]) -> float | None:
    try:
        array = np.array(values)
        # In an array of numbers none can be missing, so there is nothing to compare.
        present = array.ravel() if array.dtype.kind in "biuf" else array[array != None]  # noqa: E711 (by element)
        return cast("float", np.mean(present).item())
    except (TypeError, ValueError):
        return None


def _has_group(distributed: DistributedContext) -> bool:
    """Return whether a process group of ``torch.distributed`` connects exactly these ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    return (dist.get_rank(), dist.get_world_size()) == (distributed.rank, distributed.size)


class RankExchange:
    """Exchanges among the ranks of a run; all ranks must call the same methods in the same order.

    Objects go through the process group, if all ranks have one: through the store of ``distributed``, the bytes of an
    exchange would grow with the square of the number of ranks. First the ranks meet at the store, which names a rank
    that does not come, while a collective would wait for the group's timeout. So what may fail on one rank, such as
    pickling, comes before.
    """

    def __init__(self, distributed: DistributedContext) -> None:
        self.distributed = distributed
        self.is_alone = distributed.size == 1
        self._uses_group: bool | None = False if self.is_alone else None

    def _meet(self, operation: str) -> bool:
        """Return whether to use the process group, once all ranks are there; the first call asks all ranks."""
        if self._uses_group is None:
            self._uses_group = all(self.distributed.allgather_as(operation, _has_group(self.distributed)))
        elif self._uses_group:
            self.distributed.allgather_as(operation)
        return self._uses_group

    def unite(self, flags: int) -> int:
        """Return the bits that any rank has set."""
        united: int = functools.reduce(operator.or_, self.allgather(flags))
        return united

    def allgather(self, stuff: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order: copies, except the chief's own object on the chief."""
        pickled = pickle.dumps(stuff, pickle.HIGHEST_PROTOCOL)
        if not self._meet("run_allgather"):
            return self.distributed.allgather_as("run_allgather", stuff)
        found = [b""] * self.distributed.size
        with self.distributed.in_batches():  # watched
            dist.all_gather_object(found, pickled)
        own = [stuff] if self.distributed.rank == 0 else []
        return [*own, *map(pickle.loads, found[len(own) :])]

    def broadcast(self, stuff: Any) -> Any:
        """Return the chief's object."""
        of_chief = [pickle.dumps(stuff, pickle.HIGHEST_PROTOCOL) if self.distributed.rank == 0 else b""]
        if not self._meet("run_broadcast"):
            return self.distributed.broadcast(stuff)
        with self.distributed.in_batches():  # watched
            dist.broadcast_object_list(of_chief)
        return stuff if self.distributed.rank == 0 else pickle.loads(of_chief[0])


def average_over_ranks(
    batches: list[dict[str, Any]], exchange: RankExchange, flags: int
) -> tuple[list[dict[str, Any]], int]:
    """Return the metrics of each batch of a window, averaged over the ranks, and the flags of all ranks."""
    if exchange.is_alone:
        return batches, flags
    gathered = exchange.allgather((_as_columns(batches), len(batches), flags))
    columns = [of_rank for of_rank, _, _ in gathered]
    lengths = [length for _, length, _ in gathered]
    _require_same_window(columns, lengths)
    means = {name: _average_column([of_rank[name] for of_rank in columns]) for name in columns[0]}
    all_flags = functools.reduce(operator.or_, (flags for _, _, flags in gathered))
    return [{name: column[index] for name, column in means.items()} for index in range(lengths[0])], all_flags


def _as_columns(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of each metric in all batches, as an array if all are numbers, which is faster to send."""
    columns: dict[str, Any] = {name: [] for batch in batches for name in batch}
    for name, values in columns.items():
        values += [batch[name] for batch in batches if name in batch]
        if len(values) == len(batches) and _have_single_type(values):
            columns[name] = np.array(values)
    return columns


def _require_same_window(columns: list[dict[str, Any]], lengths: list[int]) -> None:
    first = {name: len(column) for name, column in columns[0].items()}
    for rank, (of_rank, length) in enumerate(zip(columns, lengths, strict=True)):
        counts = {name: len(column) for name, column in of_rank.items()}
        if (counts, length) != (first, lengths[0]):
            raise ValueError(
                "train_batch() must return the same metrics on every rank; got, for the batches of a workload, "
                f"{lengths[0]} times {sorted(first)} on rank 0, and {length} times {sorted(counts)} on rank {rank}."
            )
    if missing := sorted(name for name, count in first.items() if count < lengths[0]):
        raise ValueError(
            f"train_batch() must return the same metrics for every batch; {missing} came with only some of the "
            f"{lengths[0]} batches of a workload."
        )


def _average_column(of_ranks: list[Any]) -> list[Any]:
    """Return the mean over the ranks for each batch, summed in the order of ranks."""
    types = {column.dtype.type if isinstance(column, np.ndarray) else None for column in of_ranks}
    if len(types) == 1 and types <= {np.float32, np.float64}:
        # Along the last axis, numpy adds as in a vector of its own; along the first, it would not.
        means = [*np.stack(of_ranks, axis=1).mean(axis=1)]
    else:
        means = [_mean_of_present(np.array(values)) for values in zip(*of_ranks, strict=True)]
    are_arrays = isinstance(of_ranks[0], np.ndarray) or isinstance(of_ranks[0][0], np.ndarray)
    return [np.array(mean) for mean in means] if are_arrays else means


def _mean_of_present(values: np.ndarray[Any, Any]) -> Any:
    return np.mean(values[values != None])  # noqa: E711 (element by element)


def reduce_validation_metrics(
    batches: list[dict[str, Any]], reducer: Reducer | dict[str, Reducer], exchange: RankExchange, flags: int = 0
) -> tuple[dict[str, Any], int]:
    """Return the metrics of a validation, reduced over batches and ranks, and the flags of all ranks.

    A rank may have no batches, but at least one of several ranks must have some.
    """
    own: dict[str, Any] = {}
    if batches:
        reducers = _assign_reducers(list(batches[0]), reducer)
        own = {name: _reduce_one(name, reducers[name], [batch[name] for batch in batches]) for name in batches[0]}
    if exchange.is_alone:
        return own, flags
    gathered = exchange.allgather((own, len(batches), flags))
    all_flags = functools.reduce(operator.or_, (flags for _, _, flags in gathered))
    return _reduce_gathered([(metrics, count) for metrics, count, _ in gathered], reducer), all_flags


def _reduce_gathered(
    gathered: list[tuple[dict[str, Any], int]], reducer: Reducer | dict[str, Reducer]
) -> dict[str, Any]:
    names = _require_same_names([list(metrics) if count else None for metrics, count in gathered])
    reducers = _assign_reducers(names, reducer)
    per_rank = [metrics for metrics, count in gathered if count]
    counts = [count for _, count in gathered if count]
    return {name: simple_reduce(reducers[name], [metrics[name] for metrics in per_rank], counts) for name in names}


def _require_same_names(names: list[list[str] | None]) -> list[str]:
    with_batches = {rank: found for rank, found in enumerate(names) if found is not None}
    if not with_batches:
        raise RuntimeError("The validation loader is empty. See build_validation_data_loader().")
    first, expected = next(iter(with_batches.items()))
    for rank, found in with_batches.items():
        if set(found) != set(expected):
            raise ValueError(
                f"evaluate_batch() must return the same metrics on every rank; got {sorted(expected)} on rank {first}, "
                f"and {sorted(found)} on rank {rank}."
            )
    return expected


def _assign_reducers(names: list[str], reducer: Reducer | dict[str, Reducer]) -> dict[str, Reducer]:
    reducers = reducer if isinstance(reducer, dict) else dict.fromkeys(names, reducer)
    if reducers.keys() != set(names):
        raise errors.InvalidExperimentException(
            f"evaluation_reducer() returned reducers for {sorted(reducers)}, but the validation metrics are "
            f"{sorted(names)}. Return one Reducer for all metrics, or a dict with exactly these keys."
        )
    wrong = {name: value for name, value in reducers.items() if not isinstance(value, Reducer)}
    if wrong:
        raise errors.InvalidExperimentException(
            f"evaluation_reducer() must return members of det_lightning.pytorch.Reducer; got {wrong}."
        )
    return reducers


def _reduce_one(name: str, reducer: Reducer, values: list[Any]) -> Any:
    try:
        stacked = np.stack(values, axis=0)
    except ValueError as e:
        shapes = sorted({np.shape(value) for value in values}, key=str)
        raise ValueError(f"Validation metric {name!r} has another shape for some batches: {shapes}.") from e
    try:
        return simple_reduce(reducer, stacked)
    except (TypeError, ValueError) as e:
        raise TypeError(f"Validation metric {name!r} cannot be reduced by {reducer}: {e}") from e


def _have_single_type(values: list[Any]) -> bool:
    """Return whether values are numpy arrays of shape ``()`` with numbers of the same type."""
    shapes_and_types = {(value.shape, value.dtype) if type(value) is np.ndarray else None for value in values}
    only = shapes_and_types.pop()
    return only is not None and not shapes_and_types and only[0] == () and only[1].kind in "biuf"
