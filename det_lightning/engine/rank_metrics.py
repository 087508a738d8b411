"""The metrics of several ranks, averaged for a window or reduced for a validation; as rows of numbers if possible."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from det_lightning import errors
from det_lightning.distributed.group_collectives import Rows
from det_lightning.distributed.rank_exchange import RankExchange
from det_lightning.pytorch._reducer import Reducer, simple_reduce

_INT64 = range(-(2**63), 2**63)


def average_over_ranks(
    batches: list[dict[str, Any]], exchange: RankExchange, flags: int
) -> tuple[list[dict[str, Any]], int]:
    """Return the metrics of each batch of a window, averaged over the ranks, and the flags of all ranks."""
    if exchange.is_alone:
        return batches, flags
    window = PlainWindow.from_batches(batches)
    rows = None if window is None else window.rows
    reduced = exchange.reduce(rows, flags, PlainWindow.width, "report")
    if window is not None and reduced.results is not None:
        return window.with_means(reduced.results), reduced.flags
    return _average_gathered(exchange.allgather(batches)), reduced.flags


def _average_gathered(per_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    first = [list(batch) for batch in per_rank[0]]
    for rank, theirs in enumerate(per_rank):
        names = [list(batch) for batch in theirs]
        if [set(batch) for batch in names] != [set(batch) for batch in first]:
            raise ValueError(
                "train_batch() must return the same metrics on every rank; got, for the batches of a workload, "
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
    batches: list[dict[str, Any]], reducer: Reducer | dict[str, Reducer], exchange: RankExchange, flags: int = 0
) -> tuple[dict[str, Any], int]:
    """Return the metrics of a validation, reduced over batches and ranks, and the flags of all ranks.

    A rank may have no batches, but at least one of several ranks must have some.
    """
    own: dict[str, Any] = {}
    reducers: dict[str, Reducer] = {}
    if batches:
        reducers = _assign_reducers(list(batches[0]), reducer)
        own = {name: _reduce_one(name, reducers[name], [batch[name] for batch in batches]) for name in batches[0]}
    if exchange.is_alone:
        return own, flags
    plain = PlainValidation.from_metrics(own, reducers, len(batches))
    reduced = exchange.reduce(None if plain is None else plain.rows, flags, PlainValidation.width, "validation")
    if plain is not None and reduced.results is not None:
        return plain.with_results(reduced.results), reduced.flags
    return _reduce_gathered(exchange.allgather((own, len(batches))), reducer), reduced.flags


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
        # For numbers of equal type np.array() gives the same values in a fraction of the time.
        stacked = np.array(values) if _have_single_type(values) else np.stack(values, axis=0)
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


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The type of a training metric: the dtype of the numbers, and whether each number is an array of shape ``()``."""

    dtype: np.dtype[Any]
    in_array: bool

    def as_mean(self, mean: np.float64) -> Any:
        """Return a mean in numpy's type for the mean of the metric."""
        rounded = np.float32(mean) if self.dtype == np.float32 else mean
        return np.array(rounded) if self.in_array else rounded


_KIND_BY_TYPE = {kind: _Kind(np.dtype(kind), False) for kind in (float, np.float64, np.float32, np.int64)}
_KIND_BY_TYPE[int] = _KIND_BY_TYPE[np.int64]
_KIND_BY_DTYPE = {np.dtype(name): _Kind(np.dtype(name), True) for name in ("float64", "float32", "int64", "int32")}
_PLAIN = {dtype.type for dtype in _KIND_BY_DTYPE}


def _find_kind(value: Any) -> _Kind | None:
    """Return the kind of a value; None unless the value is a plain number."""
    if type(value) is np.ndarray:
        return _KIND_BY_DTYPE.get(value.dtype) if value.shape == () else None
    return None if type(value) is int and value not in _INT64 else _KIND_BY_TYPE.get(type(value))


class PlainWindow:
    """The metrics of each batch of a window, with the same names and types in each; ``kinds`` are the types."""

    #: Numbers in each row.
    width = 1

    def __init__(self, kinds: dict[str, _Kind], batches: list[dict[str, Any]]) -> None:
        self._names = list(kinds)
        self._kinds = list(kinds.values())
        columns = [_to_bits([batch[name] for batch in batches], kind.dtype) for name, kind in kinds.items()]
        #: One row for each metric of each batch, reduced to the mean.
        bits = np.stack(columns, axis=1).reshape(-1, 1)
        self.rows = Rows(bits, _hash_meaning(self._names, self._kinds, len(batches)), self._means)

    @classmethod
    def from_batches(cls, batches: list[dict[str, Any]]) -> PlainWindow | None:
        """Return the window of these batches; None if there are no values, or not all are plain."""
        if not batches or not batches[0]:
            return None
        names = list(batches[0])
        kinds = {name: kind for name, value in batches[0].items() if (kind := _find_kind(value)) is not None}
        if len(kinds) < len(names) or not all(isinstance(name, str) for name in names):
            return None
        expected = list(kinds.values())
        for batch in batches:
            if list(batch) != names or [_find_kind(value) for value in batch.values()] != expected:
                return None
        return cls(kinds, batches)

    def with_means(self, bits: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
        """Return the metrics of each batch from ``bits``, the means as float64, in the types of numpy's means."""
        return [
            {name: kind.as_mean(mean) for name, kind, mean in zip(self._names, self._kinds, means, strict=True)}
            for means in bits.view(np.float64).reshape(-1, len(self._names))
        ]

    def _means(self, first: int, bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        # One by one: numpy adds the rows of a matrix in a different order than the numbers of a vector.
        means = [
            np.mean(_from_bits(of_ranks, self._kinds[index % len(self._kinds)].dtype))
            for index, of_ranks in enumerate(bits[:, :, 0].T, first)
        ]
        return _to_bits(means, np.dtype(np.float64))


class PlainValidation:
    """The validation metrics of one rank, each reduced over ``batches`` to one number of a type in ``_PLAIN``."""

    #: Numbers in each row: the metric, and the number of batches as the weight in an average.
    width = 2

    def __init__(self, metrics: dict[str, Any], reducers: dict[str, Reducer], batches: int) -> None:
        self._names = list(metrics)
        self._reducers = [reducers[name] for name in self._names]
        self._types = [value.dtype for value in metrics.values()]
        bits = np.array([[*_to_bits([value], value.dtype), batches] for value in metrics.values()], np.int64)
        self.rows = Rows(bits, _hash_meaning(self._names, self._reducers, self._types), self._reduce)

    @classmethod
    def from_metrics(
        cls, metrics: dict[str, Any], reducers: dict[str, Reducer], batches: int
    ) -> PlainValidation | None:
        """Return the validation with these metrics; None if there are none, or not all are plain."""
        plain = all(isinstance(name, str) and type(value) in _PLAIN for name, value in metrics.items())
        return cls(metrics, reducers, batches) if metrics and plain else None

    def with_results(self, bits: np.ndarray[Any, Any]) -> dict[str, Any]:
        """Return the metrics over all ranks, given their bits, in the types of :func:`simple_reduce`."""
        types = [
            simple_reduce(reducer, np.ones(1, dtype), [1]).dtype
            for reducer, dtype in zip(self._reducers, self._types, strict=True)
        ]
        return {name: _from_bits(result, dtype) for name, result, dtype in zip(self._names, bits, types, strict=True)}

    def _reduce(self, first: int, bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        results = np.zeros(bits.shape[1], np.int64)
        for row, of_ranks in enumerate(bits.transpose(1, 0, 2)):
            values = _from_bits(of_ranks[:, 0], self._types[first + row])
            result = simple_reduce(self._reducers[first + row], values, of_ranks[:, 1].tolist())
            (results[row],) = _to_bits([result], result.dtype)
        return results


def _to_bits(numbers: Sequence[Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return integers as they are, and floating-point numbers as the bits of float64."""
    return np.array(numbers, np.int64 if dtype.kind == "i" else np.float64).view(np.int64)


def _from_bits(bits: Any, dtype: np.dtype[Any]) -> Any:
    """Return the number, or the vector of numbers, that has these bits."""
    return (bits if dtype.kind == "i" else bits.view(np.float64)).astype(dtype)


def _hash_meaning(*meaning: object) -> int:
    """Return a hash of ``meaning``, equal on ranks whose rows mean the same, if the ``repr`` is the same on all."""
    digest = hashlib.sha256(repr(meaning).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:7], "big") + 1  # not 0
