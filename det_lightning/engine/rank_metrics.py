"""The metrics of several ranks, averaged for a window or reduced for a validation."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np

from det_lightning import errors
from det_lightning.distributed.rank_exchange import RankExchange
from det_lightning.pytorch._reducer import Reducer, simple_reduce


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
    """Return the values of each metric in all batches: an array of numbers if possible, which travels fast."""
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
    """Return the mean over the ranks for each batch, added in the order of ranks as in a vector."""
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
