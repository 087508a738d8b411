"""The metrics of several ranks: averaged for a window, reduced for a validation."""

from __future__ import annotations

from typing import Any

import numpy as np

from det_lightning import errors
from det_lightning.distributed.rank_exchange import RankExchange
from det_lightning.engine.plain_metrics import PlainValidation, PlainWindow
from det_lightning.pytorch._reducer import Reducer, simple_reduce


def average_over_ranks(
    batches: list[dict[str, Any]], exchange: RankExchange, flags: int
) -> tuple[list[dict[str, Any]], int]:
    """Return the metrics of each batch of a window, averaged over the ranks, and the flags of all ranks."""
    if exchange.is_alone:
        return batches, flags
    window = PlainWindow.of(batches)
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
    batches: list[dict[str, Any]], reducer: Reducer | dict[str, Reducer], exchange: RankExchange, flags: int = 0
) -> tuple[dict[str, Any], int]:
    """Return the metrics of a validation, reduced over batches and ranks, and the flags of all ranks.

    A rank may have no batches at all, but one of several must have some.
    """
    own: dict[str, Any] = {}
    reducers: dict[str, Reducer] = {}
    if batches:
        reducers = _reducer_of_each(list(batches[0]), reducer)
        own = {name: _reduce_one(name, reducers[name], [batch[name] for batch in batches]) for name in batches[0]}
    if exchange.is_alone:
        return own, flags
    plain = PlainValidation.of(own, reducers, len(batches))
    reduced = exchange.reduce(None if plain is None else plain.rows, flags, PlainValidation.width, "validation")
    if plain is not None and reduced.results is not None:
        return plain.with_results(reduced.results), reduced.flags
    return _reduce_gathered(exchange.allgather((own, len(batches))), reducer), reduced.flags


def _reduce_gathered(
    gathered: list[tuple[dict[str, Any], int]], reducer: Reducer | dict[str, Reducer]
) -> dict[str, Any]:
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
        # For numbers of one type np.array() gives the same values in a fraction of the time.
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
