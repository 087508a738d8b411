"""Batch and Epoch: lengths, periods and schedules."""

from __future__ import annotations

import pytest

from det_lightning.units import Batch, Epoch, TrainUnit


@pytest.mark.parametrize(
    ("unit", "included"),
    [
        (Batch(1), [*range(1, 10)]),
        (Batch(4), [4, 8]),
        (Epoch(0), [*range(10)]),
        (Epoch(-2), [*range(10)]),
        *((Epoch(schedule), [5, 7]) for schedule in ([7, 5], (5, 7), {5, 7}, {5: "first", 7: "last"}, range(5, 8, 2))),
    ],
)
def test_units_include_steps(unit: TrainUnit, included: list[int]) -> None:
    assert [step for step in range(10) if unit.should_stop(step)] == included


@pytest.mark.parametrize(
    ("unit", "shown"), [(Batch(5), "Batch(5)"), (Epoch([1, 2]), "Epoch([1, 2])"), (TrainUnit(1), "TrainUnit(1)")]
)
def test_units_show_what_they_are(unit: TrainUnit, shown: str) -> None:
    assert repr(unit) == shown
