"""adaptive_asha and async_halving: who is stopped, and who follows."""

from __future__ import annotations

import math
from typing import Any

import pytest

from det_lightning.config import Length
from det_lightning.experiments.search.operations import CreateTrial, ExitReason, Operation, Shutdown, StopTrial, Warn
from det_lightning.experiments.search.search import Search
from tests.experiments.search.spaces import number, searcher

NAN = math.nan


def halving(**changed: Any) -> Search:
    """Rungs at 4 and 16 with a divisor of 4, and eight trials, all at once."""
    given: dict[str, Any] = {"name": "async_halving", "max_trials": 8, "num_rungs": 2, "max_time": 16, **changed}
    if given["name"] == "adaptive_asha":
        del given["num_rungs"]
    return Search(searcher(**given), {"x": number(0, 1)}, 0)


def begun(**changed: Any) -> Search:
    search = halving(**changed)
    search.initial()
    return search


def stops(operations: list[Operation]) -> list[int]:
    return [operation.trial_id for operation in operations if isinstance(operation, StopTrial)]


def creates(operations: list[Operation]) -> list[int]:
    return [operation.trial_id for operation in operations if isinstance(operation, CreateTrial)]


@pytest.mark.parametrize(
    ("metrics", "decisions"),
    [
        ([0.5, 0.5, 0.4, 0.6, 0.45, 0.3, 0.35, 0.2], "CCCSSCSC"),
        ([0.5] * 8, "CCCCCCCC"),
        ([0.2, 0.3, 0.4, 0.5, 0.1, 0.25, 0.15, 0.2], "CSSSCSSS"),
        ([0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1], "CCCCCCCC"),
        ([NAN, NAN, 0.5, NAN, 0.4, NAN, 0.9, NAN], "CSCSCSSS"),
        ([NAN] * 8, "CSSSSSSS"),
        ([math.inf, NAN, math.inf, 1e308], "CSCC"),
    ],
)
@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_best_of_a_rung_continue(metrics: list[float], decisions: str, smaller_is_better: bool) -> None:
    search = begun(smaller_is_better=smaller_is_better)
    decided = ""
    for trial_id, metric in enumerate(metrics, start=1):
        operations = search.validation_completed(trial_id, metric if smaller_is_better else -metric, 4)
        decided += "S" if stops(operations) == [trial_id] else "C"
        assert any(isinstance(operation, Warn) for operation in operations) == math.isnan(metric)
    assert decided == decisions


def test_nothing_is_decided_before_a_rung() -> None:
    search = begun()
    assert search.validation_completed(1, 0.1, 4) == []
    assert search.validation_completed(2, 0.9, 3.99) == []
    assert search.validation_completed(2, 0.9, 4.5) == [StopTrial(2)]
    assert search.validation_completed(2, 0.9, 4.5) == []  # decided already
    assert search.validation_completed(1, 0.9, 4) == []
    assert search.validation_completed(1, 0.1, 16) == [StopTrial(1)]  # the top rung stops even the best


def test_late_validation_counts_in_all_rungs() -> None:
    search = begun(num_rungs=3, max_time=64, max_trials=5)
    assert search.validation_completed(1, 0.1, 20) == []
    assert stops(search.validation_completed(2, 0.05, 4)) == []
    assert stops(search.validation_completed(2, 0.2, 16)) == [2]


def test_worse_and_worse_trials_stop() -> None:
    search = halving(max_trials=10, max_concurrent_trials=3, num_rungs=3, divisor=3, max_time=900)
    running = creates(search.initial())
    assert running == [1, 2, 3]
    stopped_at: dict[int, int] = {}
    for trial_id in running:
        for at in range(100, 901, 100):
            operations = search.validation_completed(trial_id, trial_id / 10, at)
            running += creates(operations)
            if stops(operations):
                stopped_at[trial_id] = at
                break
        last = search.trial_exited(trial_id, ExitReason.COMPLETED)
    assert stopped_at == {1: 900, **dict.fromkeys(range(2, 11), 100)}
    assert last == [Shutdown(ExitReason.COMPLETED)]


@pytest.mark.parametrize(
    ("smaller_is_better", "exits", "reached"),
    [
        (True, {}, {1: 900, 2: 300, 3: 300, 4: 900, 5: 900}),
        (True, {2}, {1: 900, 3: 300, 4: 900, 5: 900}),
        (False, {}, {1: 900, 2: 900, 3: 900, 4: 900, 5: 900}),
        (False, {2}, {1: 900, 3: 900, 4: 900, 5: 900}),
    ],
)
def test_brackets_compare_their_own_trials_only(smaller_is_better: bool, exits: set[int], reached: Any) -> None:
    search = halving(
        name="adaptive_asha", max_trials=5, max_rungs=2, divisor=3, max_time=900, smaller_is_better=smaller_is_better
    )
    assert creates(search.initial()) == [1, 2, 3, 4, 5]
    found = {}
    for trial_id in range(1, 6):
        if trial_id in exits:
            search.trial_exited(trial_id, ExitReason.ERRORED)
            continue
        early = search.validation_completed(trial_id, trial_id / 10, 300)
        found[trial_id] = 300 if stops(early) else 900
        if not stops(early):
            assert stops(search.validation_completed(trial_id, trial_id / 10, 900)) == [trial_id]
    assert found == reached


def test_completed_trial_has_no_follower() -> None:
    search = begun(max_concurrent_trials=2)
    assert search.trial_exited(1, ExitReason.COMPLETED) == []
    assert search.trial_exited(2, ExitReason.COMPLETED) == [Shutdown(ExitReason.COMPLETED)]


@pytest.mark.parametrize("reason", [ExitReason.ERRORED, ExitReason.CANCELED])
def test_failed_trial_ranks_last(reason: ExitReason) -> None:
    search = begun(divisor=2, max_concurrent_trials=5, max_time=8)
    assert creates(search.trial_exited(1, reason)) == [6]
    assert creates(search.trial_exited(2, reason)) == [7]
    assert search.validation_completed(3, 0.5, 4) == []
    assert search.validation_completed(4, 0.6, 4) == [], "the second of four, of which two failed"
    assert stops(search.validation_completed(5, 0.7, 4)) == [5]


def test_stopped_trial_keeps_its_rank() -> None:
    search = begun(max_concurrent_trials=2)
    search.validation_completed(1, 0.1, 4)
    assert creates(search.validation_completed(2, 0.2, 4)) == [3]
    assert search.trial_exited(2, ExitReason.ERRORED) == []


def test_retried_trial_is_ranked_anew() -> None:
    search = begun(max_trials=4, max_concurrent_trials=2, max_time=8)
    search.trial_exited(1, ExitReason.ERRORED)  # trial 3 follows
    search.trial_retried(1)
    assert search.validation_completed(1, 0.5, 2) == []
    assert search.validation_completed(2, 1.0, 2)[0] == StopTrial(2)  # worse than trial 1
    assert search.validation_completed(1, 0.5, 8) == [StopTrial(1)]  # at the end; its follower is there already


def test_stopped_trial_is_not_ranked_anew() -> None:
    search = begun(max_trials=4, max_concurrent_trials=2, max_time=8)
    search.validation_completed(1, 0.5, 2)
    assert search.validation_completed(2, 1.0, 2)[0] == StopTrial(2)
    search.trial_exited(2, ExitReason.ERRORED)
    search.trial_retried(2)
    assert search.validation_completed(2, 0.1, 3) == []
    assert search.trial_exited(2, ExitReason.COMPLETED) == []


def test_invalid_trial_is_replaced() -> None:
    search = begun(max_trials=3, max_concurrent_trials=2)
    assert search.validation_completed(1, 0.1, 4) == []
    assert creates(search.trial_exited(1, ExitReason.INVALID_HP)) == [3]
    assert search.validation_completed(2, 0.9, 4) == []
    assert creates(search.validation_completed(3, 0.95, 4)) == [4]
    for trial_id in (2, 3):
        search.trial_exited(trial_id, ExitReason.COMPLETED)
    assert search.trial_exited(4, ExitReason.COMPLETED) == [Shutdown(ExitReason.COMPLETED)]


def test_hopeless_search_ends() -> None:
    search = begun(max_trials=1)
    for trial_id in range(1, 101):
        assert creates(search.trial_exited(trial_id, ExitReason.INVALID_HP)) == [trial_id + 1]
    warning, shutdown = search.trial_exited(101, ExitReason.INVALID_HP)
    assert warning == Warn(101, "not replaced: 100 trials before it had invalid hyperparameters")
    assert shutdown == Shutdown(ExitReason.COMPLETED)


@pytest.mark.parametrize(
    ("metric", "at", "named"),
    [
        (None, 4, "'loss', which is the searcher's metric"),
        (0.5, None, "'batches', which is the searcher's time_metric"),
    ],
)
def test_missing_metric_fails_the_trial(metric: Any, at: Any, named: str) -> None:
    search = begun(max_trials=2, max_concurrent_trials=1)
    stop, follower = search.validation_completed(1, metric, at)
    assert isinstance(stop, StopTrial)
    assert stop.error is not None
    assert named in stop.error
    assert creates([follower]) == [2]
    assert search.validation_completed(1, metric, at) == []
    assert search.trial_exited(1, ExitReason.COMPLETED) == []
    assert search.trial_exited(2, ExitReason.ERRORED) == [Shutdown(ExitReason.ERRORED)]


@pytest.mark.parametrize(
    ("batches", "settings", "lengths"),
    [
        (64, {"name": "adaptive_asha", "max_trials": 50}, {(4, 16, 64), (16, 64)}),
        (2, {"name": "async_halving", "max_trials": 8, "num_rungs": 3}, {(1, 2)}),  # two rungs have one length
    ],
)
def test_forced_validations_are_at_rungs(batches: int, settings: dict[str, Any], lengths: set[tuple[int, ...]]) -> None:
    search = Search(searcher(**settings, max_length=Length(batches, "batches")), {"x": number(0, 1)}, 0)
    assert {trial.validate_at for trial in search.initial() if isinstance(trial, CreateTrial)} == lengths
