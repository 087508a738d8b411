"""Batch and Epoch: lengths, periods and schedules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.units import Batch, Epoch

steps = st.integers(1, 10_000)


@given(period=st.integers(1, 200), step=steps)
def test_period_names_its_multiples(period: int, step: int) -> None:
    assert Batch(period).should_stop(step) == (step in range(period, step + 1, period))
    assert not Batch(period).should_stop(0)


@given(period=st.integers(max_value=0), step=steps)
def test_period_below_one_names_every_step(period: int, step: int) -> None:
    assert Epoch(period).should_stop(step)


@given(schedule=st.frozensets(steps, max_size=8), step=steps)
def test_container_names_its_steps(schedule: frozenset[int], step: int) -> None:
    assert Batch(schedule).should_stop(step) == (step in schedule)
    assert Batch(sorted(schedule)).should_stop(step) == (step in schedule)


@pytest.mark.parametrize("container", [[5, 30], (5, 30), {5, 30}, {5: "first", 30: "second"}, range(5, 31, 25)])
def test_any_container_is_a_schedule(container: Any) -> None:
    assert [step for step in range(100) if Epoch(container).should_stop(step)] == [5, 30]
