"""The schedule: which boundaries lie after which batch, and what is done there."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.checkpoint.format.content import TrialState
from det_lightning.engine.schedule import Action, BoundaryActions, Due, Schedule
from det_lightning.units import Batch, Epoch, TrainUnit

values = st.integers(-1, 12) | st.just(sys.maxsize) | st.frozensets(st.integers(1, 30), max_size=4)
periods = st.none() | st.builds(Batch, values) | st.builds(Epoch, values)
lengths = st.none() | st.builds(Batch, st.integers(1, 40)) | st.builds(Epoch, st.integers(1, 8))
schedules = st.builds(Schedule, lengths, periods, periods, periods)


def lies_after(unit: TrainUnit | None, batch_idx: int, epoch_len: int) -> bool:
    """Tell, in the words of Determined's documentation, whether ``unit`` has a boundary after a batch."""
    if unit is None:
        return False
    epoch_idx, is_last = batch_idx // epoch_len, (batch_idx + 1) % epoch_len == 0
    step = batch_idx + 1 if isinstance(unit, Batch) else epoch_idx + 1
    if isinstance(unit, Epoch) and not is_last:
        return False
    if isinstance(unit.value, int):
        return unit.value < 1 or step % unit.value == 0
    return step in unit.value


@given(st.tuples(lengths, periods, periods, periods), st.integers(0, 60), st.integers(1, 9))
def test_due_boundaries_are_those_that_a_batch_passed(units: tuple[Any, ...], batch_idx: int, epoch_len: int) -> None:
    boundaries = zip(Due, units, strict=True)
    expected = [boundary for boundary, unit in boundaries if lies_after(unit, batch_idx, epoch_len)]
    assert Schedule(*units).due(batch_idx + 1, epoch_len) == expected


@given(schedules, st.integers(0, 60), st.integers(1, 9))
def test_no_boundary_is_overlooked(schedule: Schedule, trained: int, epoch_len: int) -> None:
    look = schedule.next_batch_to_look(trained, epoch_len)
    assert look > trained
    for batches in range(trained + 1, min(look, trained + 100)):
        assert schedule.due(batches, epoch_len) == []


@given(lengths, st.integers(1, 9))
def test_plain_periods_are_looked_at_rarely(length: TrainUnit | None, epoch_len: int) -> None:
    schedule = Schedule(length, Batch(4), Epoch(2))
    assert schedule.due(schedule.next_batch_to_look(0, epoch_len), epoch_len)


def test_endless_epochs_have_no_boundary() -> None:
    schedule = Schedule(Batch(10), validation_period=Epoch(1))
    assert [n for n in range(1, 25) if schedule.due(n, sys.maxsize)] == [10, 20]
    assert schedule.next_batch_to_look(0, sys.maxsize) == 10


def test_no_period_has_no_boundary() -> None:
    assert Schedule().next_batch_to_look(7, 10) == sys.maxsize
    assert Schedule().due(10, 10) == []


@pytest.mark.parametrize(
    ("length", "trained", "complete"),
    [
        (Batch(5), TrialState(batches_trained=4, epochs_trained=9), False),
        (Batch(5), TrialState(batches_trained=6), True),
        (Epoch(2), TrialState(batches_trained=99, epochs_trained=1), False),
        (Epoch(2), TrialState(epochs_trained=2), True),
        (None, TrialState(batches_trained=10**9, epochs_trained=10**9), False),
    ],
)
def test_run_is_complete_from_its_length_on(length: TrainUnit | None, trained: TrialState, complete: bool) -> None:
    assert Schedule(length).is_complete(trained) is complete


@given(schedules, st.lists(st.sampled_from(list(Due)), unique=True).map(sorted), st.lists(st.booleans()))
def test_boundaries_stop_at_most_once(schedule: Schedule, due: list[Due], wishes: list[bool]) -> None:
    """A validation and a checkpoint come once, too; tests/conformance/test_same_loop.py has where they come."""
    answers, done, state = iter(wishes), list[Action](), TrialState(batches_trained=10)
    actions = BoundaryActions(schedule, state, lambda: next(answers, False))
    actions.begin(due)
    while (action := actions.next()) is not None:
        done.append(action)
        if action is Action.VALIDATE:
            state.last_val = state.batches_trained
        if action is Action.CHECKPOINT:
            state.last_ckpt = state.batches_trained
    assert done.count(Action.STOP) <= 1
    assert Action.STOP not in done[:-1]
    assert max(map(done.count, done), default=0) <= 1


def test_all_mistakes_are_named() -> None:
    with pytest.raises(TypeError) as raised:
        wrong: dict[str, Any] = {"validation_period": 5, "checkpoint_period": "daily"}
        Schedule(Batch([1, 2]), reporting_period=TrainUnit(1), **wrong)
    given = {"validation": "5 of type int", "checkpoint": "'daily' of type str", "reporting": "TrainUnit(1)"}
    for period, value in given.items():
        expected = f"{period}_period must be a Batch or an Epoch, such as Batch(100); got {value}"
        assert expected in str(raised.value)
    assert "max_length must be Batch(int) or Epoch(int); got Batch([1, 2])" in str(raised.value)


@pytest.mark.parametrize(
    ("length", "batches_trained", "progress"),
    [
        (None, 3, None),
        (Batch(10), 4, 0.4),
        (Epoch(5), 4, 0.2),
        (Batch(10), 12, 1.0),
        (Batch(0), 0, 1.0),
    ],
)
def test_progress_is_a_fraction(length: TrainUnit | None, batches_trained: int, progress: float | None) -> None:
    assert Schedule(length).progress(TrialState(batches_trained=batches_trained), epoch_len=4) == progress


@pytest.mark.parametrize(
    ("max_length", "trained", "epochs_trained", "in_all"),
    [
        (Epoch(3), 0, 0, 3),
        (Batch(21), 0, 0, 3),
        (Batch(22), 0, 0, 4),
        (Batch(20), 10, 1, 3),
        (Batch(20), 14, 4, 5),  # the epochs of an earlier run were shorter
        (None, 0, 0, None),
    ],
)
def test_length_in_batches_is_rounded_up_to_epochs(
    max_length: TrainUnit | None, trained: int, epochs_trained: int, in_all: int | None
) -> None:
    state = TrialState(batches_trained=trained, epochs_trained=epochs_trained)
    assert Schedule(max_length).count_epochs(state, epoch_len=7) == in_all
