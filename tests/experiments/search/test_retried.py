"""Failed trials that go on: the search counts them again, and creates no other trials because of it."""

from __future__ import annotations

import dataclasses

from hypothesis import given

from det_lightning.config.searchers import Searcher
from det_lightning.experiments.search.operations import ExitReason, Shutdown, StopTrial
from det_lightning.experiments.search.search import Search
from tests.experiments.search.simulation import Chances, report
from tests.experiments.search.spaces import searcher
from tests.experiments.search.test_simulated import (
    SPACE,
    all_chances,
    any_settings,
    check_number_of_trials,
    seeds,
    simulated,
)


@given(of=any_settings, chances=all_chances, seed=seeds)
def test_retries_keep_number_and_replay(of: Searcher, chances: Chances, seed: int) -> None:
    simulation = simulated(of, dataclasses.replace(chances, error=0.2, retry=0.3), seed)
    check_number_of_trials(of, simulation)
    assert ExitReason.ERRORED not in simulation.exits().values()
    assert simulation.search.is_finished
    assert simulation.shutdowns()[-1] == Shutdown(ExitReason.COMPLETED)
    replayed = Search(of, SPACE, seed)
    assert [replayed.initial(), *(report(replayed, event) for event in simulation.events)] == simulation.answers


def asha() -> Search:
    of = searcher("async_halving", max_trials=4, max_concurrent_trials=2, num_rungs=2, max_time=8)
    search = Search(of, SPACE, 7)
    search.initial()
    return search


def test_retried_trial_is_ranked_anew() -> None:
    search = asha()
    search.trial_exited(1, ExitReason.ERRORED)  # trial 3 follows
    search.trial_retried(1)
    assert search.validation_completed(1, 0.5, 2) == []
    assert search.validation_completed(2, 1.0, 2)[0] == StopTrial(2)  # worse than trial 1
    assert search.validation_completed(1, 0.5, 8) == [StopTrial(1)]  # at the end; its follower is there already


def test_stopped_trial_is_not_ranked_anew() -> None:
    search = asha()
    search.validation_completed(1, 0.5, 2)
    assert search.validation_completed(2, 1.0, 2)[0] == StopTrial(2)
    search.trial_exited(2, ExitReason.ERRORED)
    search.trial_retried(2)
    assert search.validation_completed(2, 0.1, 3) == []
    assert search.trial_exited(2, ExitReason.COMPLETED) == []
