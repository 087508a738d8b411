"""single, random and grid: which trials they create, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from det_lightning.experiments.search.operations import CreateTrial, ExitReason, Operation, Shutdown, Warn
from det_lightning.experiments.search.powers import raise_to_power
from det_lightning.experiments.search.search import MOST_PLANNED, Search, plan_trials
from tests.experiments.search.spaces import choice, constant, integer, number, power, searcher

SPACE: dict[str, Any] = {
    "batch": integer(16, 64, count=2),
    "lr": power(-4, -1, 10, count=2),
    "opt": choice("a", "b", "c"),
}


def ids(operations: list[Operation]) -> list[int]:
    return [operation.trial_id for operation in operations if isinstance(operation, CreateTrial)]


def test_seed_42_gives_these_trials() -> None:
    trials = [
        CreateTrial(1, 670094950, {"batch": 54, "lr": 0.024526126311336768, "opt": "c"}),
        CreateTrial(2, 893664919, {"batch": 34, "lr": 0.00019949166150633936, "opt": "c"}),
        CreateTrial(3, 3344769, {"batch": 18, "lr": 0.00011527987128232398, "opt": "b"}),
    ]
    assert plan_trials(searcher("random", max_trials=3), SPACE, 42) == trials
    assert plan_trials(searcher("single"), SPACE, 42) == trials[:1]


@pytest.mark.parametrize("seed", [0, 84, 1700000000, 2**32 - 1])
def test_draws_have_determineds_order(seed: int) -> None:
    state = np.random.RandomState(seed)
    for trial in plan_trials(searcher("random", max_trials=20, max_concurrent_trials=3), SPACE, seed):
        batch = 16 + state.randint(0, 49)
        lr = raise_to_power(10, state.uniform(-4, -1))
        opt = "abc"[state.randint(0, 3)]
        state.bytes(16)
        assert trial.hparams == {"batch": batch, "lr": lr, "opt": opt}
        assert trial.trial_seed == state.randint(0, 2**31)


def test_grid_draws_ids_and_seeds_only() -> None:
    state = np.random.RandomState(5)
    trials = plan_trials(searcher("grid", max_concurrent_trials=5), SPACE, 5)
    assert len(trials) == 12
    assert trials[0].hparams == {"batch": 64, "lr": 0.1, "opt": "c"}
    for trial in trials:
        state.bytes(16)
        assert trial.trial_seed == state.randint(0, 2**31)


def test_most_trials_of_a_huge_grid_are_created_later() -> None:
    space = {str(i): integer(0, 1000, count=1000) for i in range(10)}
    assert ids(Search(searcher("grid", max_concurrent_trials=1), space, 5).initial()) == [1]
    assert len(plan_trials(searcher("grid"), space, 5)) == MOST_PLANNED


@pytest.mark.parametrize(("at_once", "initial"), [(2, [1, 2]), (5, [1, 2, 3, 4]), (0, [1, 2, 3, 4])])
def test_random_replaces_ended_trials(at_once: int, initial: list[int]) -> None:
    search = Search(searcher("random", max_trials=4, max_concurrent_trials=at_once), SPACE, 0)
    created = ids(search.initial())
    assert created == initial
    for ended in (2, 1, 3, 4):
        operations = search.trial_exited(ended, ExitReason.COMPLETED)
        created += ids(operations)
    assert created == [1, 2, 3, 4]
    assert operations == [Shutdown(ExitReason.COMPLETED)]


def test_random_replaces_invalid_trials() -> None:
    search = Search(searcher("random", max_trials=2, max_concurrent_trials=1), SPACE, 0)
    search.initial()
    assert ids(search.trial_exited(1, ExitReason.INVALID_HP)) == [2]
    assert ids(search.trial_exited(2, ExitReason.COMPLETED)) == [3]
    assert search.trial_exited(3, ExitReason.COMPLETED) == [Shutdown(ExitReason.COMPLETED)]


def test_hopeless_search_ends() -> None:
    search = Search(searcher("random", max_trials=2), SPACE, 0)
    created = ids(search.initial())
    operations: list[Operation] = []
    for trial_id in created:  # it grows
        followers = search.trial_exited(trial_id, ExitReason.INVALID_HP)
        created += ids(followers)
        operations += followers
    assert len(created) == 102
    assert [warning.trial_id for warning in operations if isinstance(warning, Warn)] == [101, 102]
    assert operations[-1] == Shutdown(ExitReason.COMPLETED)


@pytest.mark.parametrize("name", ["single", "grid"])
def test_single_and_grid_replace_nothing(name: str) -> None:
    search = Search(searcher(name), {"x": choice(1)}, 0)
    assert ids(search.initial()) == [1]
    assert search.trial_exited(1, ExitReason.INVALID_HP) == [Shutdown(ExitReason.COMPLETED)]


@pytest.mark.parametrize(
    ("reasons", "outcome"),
    [
        ((ExitReason.ERRORED, ExitReason.ERRORED), ExitReason.ERRORED),
        ((ExitReason.CANCELED, ExitReason.CANCELED), ExitReason.CANCELED),
        ((ExitReason.ERRORED, ExitReason.CANCELED), ExitReason.COMPLETED),
        ((ExitReason.ERRORED, ExitReason.COMPLETED), ExitReason.COMPLETED),
    ],
)
def test_experiment_fails_if_all_trials_fail(reasons: tuple[ExitReason, ...], outcome: ExitReason) -> None:
    search = Search(searcher("random", max_trials=2), SPACE, 0)
    search.initial()
    assert search.trial_exited(1, reasons[0]) == []
    assert search.trial_exited(2, reasons[1]) == [Shutdown(outcome)]


def test_second_exit_is_ignored() -> None:
    search = Search(searcher("random", max_trials=2, max_concurrent_trials=1), SPACE, 0)
    search.initial()
    assert search.validation_completed(1, None, None) == []
    assert ids(search.trial_exited(1, ExitReason.ERRORED)) == [2]
    assert search.trial_exited(1, ExitReason.ERRORED) == []


@pytest.mark.parametrize("trial_id", [0, 3])
def test_unknown_trial_is_refused(trial_id: int) -> None:
    search = Search(searcher("random", max_trials=2), SPACE, 0)
    search.initial()
    with pytest.raises(ValueError, match=f"trial {trial_id} was not created"):
        search.trial_exited(trial_id, ExitReason.COMPLETED)
    with pytest.raises(ValueError, match=f"trial {trial_id} was not created"):
        search.validation_completed(trial_id, 0.0, 1)


def test_trial_may_change_its_hyperparameters() -> None:
    first, second = Search(searcher("random", max_trials=2), {"layers": choice([1])}, 0).initial()
    assert isinstance(first, CreateTrial)
    assert isinstance(second, CreateTrial)
    first.hparams["layers"].append(2)
    assert second.hparams == {"layers": [1]}


def test_whole_numbers_become_integers() -> None:
    space: dict[str, Any] = {
        "hidden": constant(1000.0),
        "layers": constant([8.0, {"size": 2.5}]),
        "lr": power(0, 1, 10, count=2),
        "rate": number(1, 2, count=3),
        "limit": constant(1e30),
    }
    trials = plan_trials(searcher("grid"), space, 0)
    assert repr(trials[0].hparams["hidden"]) == "1000"
    assert repr(trials[0].hparams["layers"]) == "[8, {'size': 2.5}]"
    assert {repr(trial.hparams["lr"]) for trial in trials} == {"1", "10"}
    assert {repr(trial.hparams["rate"]) for trial in trials} == {"1", "1.5", "2"}
    assert repr(trials[0].hparams["limit"]) == "1e+30"
