"""Reducers: metrics over all batches and ranks together."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import SequentialSampler

from det_lightning.pytorch import MetricReducer, Reducer
from det_lightning.pytorch._reducer import FunctionReducer, ReducerRegistry, simple_reduce
from det_lightning.pytorch.samplers import DistributedSampler


class Extent(MetricReducer):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def reset(self) -> None:
        self.seen = []

    def update(self, *values: float) -> None:
        self.seen += values

    def per_slot_reduce(self) -> tuple[float, float]:
        return min(self.seen), max(self.seen)

    def cross_slot_reduce(self, per_slot_metrics: list[tuple[float, float]]) -> dict[str, float]:
        return {"low": min(low for low, _ in per_slot_metrics), "high": max(high for _, high in per_slot_metrics)}


class Width(Extent):
    def cross_slot_reduce(self, per_slot_metrics: list[tuple[float, float]]) -> Any:
        both = super().cross_slot_reduce(per_slot_metrics)
        return both["high"] - both["low"]


@pytest.fixture
def registry() -> ReducerRegistry:
    return ReducerRegistry()


@given(st.integers(0, 30), st.integers(1, 5))
def test_reducers_get_values_in_the_order_of_the_data(size: int, ranks: int) -> None:
    shards = [list(DistributedSampler(SequentialSampler(range(size)), ranks, rank)) for rank in range(ranks)]
    assert FunctionReducer(list).cross_slot_reduce(shards) == list(range(size))


def test_values_are_reduced_and_forgotten(registry: ReducerRegistry) -> None:
    width = Width()
    assert registry.wrap_reducer(width, "width") is width
    values, extent = registry.wrap_reducer(list, "values"), registry.wrap_reducer(Extent())
    for value in (1.0, None, 3.0):
        values.update(value)
    for reducer in (extent, width):
        reducer.update(1.0, 4.0)
    expected = {"values": [1.0, None, 3.0], "low": 1.0, "high": 4.0, "width": 3.0}
    assert registry.reduce_metrics(for_training=True) == expected
    registry.reset_reducers()
    for reducer in (values, extent, width):
        reducer.update(5.0)
    assert registry.reduce_metrics(for_training=True) == {"values": [5.0], "low": 5.0, "high": 5.0, "width": 0.0}


def test_reducer_is_of_training_validation_or_both(registry: ReducerRegistry) -> None:
    assert registry.reduce_metrics(for_training=True) == {}
    registry.wrap_reducer(len, "both")
    registry.wrap_reducer(lambda values: "t", "training", for_validation=False)
    registry.wrap_reducer(lambda values: "v", "validation", for_training=False)
    assert registry.reduce_metrics(for_training=True) == {"both": 0, "training": "t"}
    assert registry.reduce_metrics(for_training=False) == {"both": 0, "validation": "v"}


predictions = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 7.0])]
targets = [torch.tensor([1.0, 4.0]), torch.tensor([3.0, 3.0])]
MEAN_SQUARE, MEAN_ABSOLUTE = (0 + 4 + 0 + 16) / 4, (0 + 2 + 0 + 4) / 4


def test_torchmetrics_can_be_wrapped(registry: ReducerRegistry) -> None:
    members: Any = {"square": torchmetrics.MeanSquaredError(), "absolute": torchmetrics.MeanAbsoluteError()}
    collection = registry.wrap_reducer(torchmetrics.MetricCollection(members, prefix="error_"))
    metric = torchmetrics.MeanSquaredError()
    assert registry.wrap_reducer(metric, "mse") is metric
    for batch in zip(predictions, targets, strict=True):
        metric.update(*batch)
        collection.update(*batch)
    reduced = registry.reduce_metrics(for_training=False)
    assert reduced == {"mse": MEAN_SQUARE, "error_square": MEAN_SQUARE, "error_absolute": MEAN_ABSOLUTE}
    assert all(isinstance(value, torch.Tensor) for value in reduced.values())
    registry.reset_reducers()
    metric.update(predictions[0], targets[0])
    collection.update(predictions[0], targets[0])
    assert registry.reduce_metrics(for_training=False) == {"mse": 2.0, "error_square": 2.0, "error_absolute": 1.0}


def two_metrics(values: list[Any]) -> dict[str, int]:
    return {"b": 2, "a": 1}


@pytest.mark.parametrize(
    ("reducer", "name", "message"),
    [
        (len, None, r"reducer function len\(\) was wrapped with name=None .* got 0 of type int.*Pass name="),
        (two_metrics, "mine", r"two_metrics\(\) was wrapped with name='mine' .* the keys \['a', 'b'\].*Leave out"),
    ],
)
def test_wrong_result_of_a_reducer_is_named(
    registry: ReducerRegistry, reducer: Any, name: str | None, message: str
) -> None:
    registry.wrap_reducer(reducer, name)
    with pytest.raises(AssertionError, match=message):
        registry.reduce_metrics(for_training=True)


def divide(values: list[float]) -> float:
    return 1 / len(values)


@pytest.mark.parametrize(
    ("reducer", "message"),
    [
        (divide, r"reducer function divide\(\) \(name='m'\) failed in cross_slot_reduce\(\) with .*=\(\[\],\): .*zero"),
        (functools.partial(divide), r"reducer function functools.partial\(.*divide.* failed in cross_slot_reduce"),
        (Extent(), r"reducer Extent \(name='m'\) failed in per_slot_reduce\(\): "),
    ],
)
def test_failing_reducer_is_named(registry: ReducerRegistry, reducer: Any, message: str) -> None:
    registry.wrap_reducer(reducer, "m")
    with pytest.raises(ValueError, match=message) as raised:
        registry.reduce_metrics(for_training=True)
    assert raised.value.__cause__ is not None


def test_simple_reductions_compute_their_names() -> None:
    expected = {Reducer.AVG: 3.0, Reducer.SUM: 12.0, Reducer.MAX: 6.0, Reducer.MIN: 1.0}
    for values in ([1.0, 2.0, 3.0, 6.0], np.array([[1.0, 2.0], [3.0, 6.0]])):
        assert {reducer: simple_reduce(reducer, values) for reducer in Reducer} == expected
    assert simple_reduce(Reducer.AVG, [1.0, 4.0], num_batches=[2, 1]) == 2.0
    assert simple_reduce(Reducer.SUM, [1.0, 4.0], num_batches=[2, 1]) == 5.0
