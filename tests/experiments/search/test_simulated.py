"""What is true of every search, whatever its trials do and in whichever order."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from det_lightning.config.searchers import AdaptiveAshaSearcher, Searcher
from det_lightning.experiments.search.halving import make_brackets
from det_lightning.experiments.search.operations import CreateTrial, ExitReason, Shutdown, StopTrial
from det_lightning.experiments.search.search import Search, plan_trials
from det_lightning.experiments.search.space import Grid
from tests.experiments.search.oracle import Oracle
from tests.experiments.search.simulation import Chances, Simulation, report
from tests.experiments.search.spaces import choice, integer, number, searcher

SPACE: dict[str, Any] = {"x": number(0, 1, count=3), "n": {"k": integer(1, 4, count=2)}, "c": choice(1, 2)}

at_once = st.integers(0, 20)
halving_settings = st.builds(
    searcher,
    name=st.just("adaptive_asha"),
    smaller_is_better=st.booleans(),
    max_trials=st.integers(1, 40),
    max_concurrent_trials=at_once,
    max_time=st.integers(1, 30),
    mode=st.sampled_from(["aggressive", "standard", "conservative"]),
    divisor=st.sampled_from([1.5, 2.0, 3.0, 4.0]),
    max_rungs=st.integers(1, 5),
)
sampling_settings = st.one_of(
    st.just(searcher("single")),
    st.builds(searcher, st.just("grid"), max_concurrent_trials=at_once),
    st.builds(searcher, st.just("random"), max_trials=st.integers(1, 40), max_concurrent_trials=at_once),
)
any_settings = st.one_of(halving_settings, sampling_settings)
all_chances = st.builds(
    Chances,
    error=st.sampled_from([0.0, 0.1]),
    invalid=st.sampled_from([0.0, 0.1]),
    nan=st.sampled_from([0.0, 0.2, 1.0]),
    ignore_stop=st.sampled_from([0.0, 0.5]),
)
harmless = st.builds(Chances, nan=st.sampled_from([0.0, 0.2]), ignore_stop=st.sampled_from([0.0, 0.5]))
seeds = st.integers(0, 2**32 - 1)


def simulated(of: Searcher, chances: Chances, seed: int, slots: int = 1000) -> Simulation:
    simulation = Simulation(Search(of, SPACE, seed), random.Random(seed), chances, getattr(of, "max_time", 5), slots)
    simulation.run()
    return simulation


def count_trials(of: Searcher) -> int:
    """Return how many valid trials a search asks for."""
    if of.name == "single":
        return 1
    if of.name == "grid":
        return Grid(SPACE).size
    return of.max_trials if of.name == "random" else sum(bracket.max_trials for bracket in make_brackets(of))


def check_number_of_trials(of: Searcher, simulation: Simulation) -> None:
    """There are as many valid trials as asked for, but for those beyond the limit of replacements."""
    invalid = sum(reason is ExitReason.INVALID_HP for reason in simulation.exits().values())
    counted = len(simulation.created()) - (invalid if of.name in ("random", "adaptive_asha") else 0)
    assert 0 <= count_trials(of) - counted <= len(simulation.not_replaced())


@given(of=any_settings, chances=all_chances, seed=seeds, slots=st.sampled_from([1, 3, 1000]))
def test_last_trial_ends_the_search(of: Searcher, chances: Chances, seed: int, slots: int) -> None:
    simulation = simulated(of, chances, seed, slots)
    assert [trial.trial_id for trial in simulation.created()] == list(range(1, len(simulation.exits()) + 1))
    check_number_of_trials(of, simulation)
    assert len(simulation.stopped()) == len(set(simulation.stopped()))
    if of.name == "adaptive_asha":
        assert simulation.most_undecided == len(simulation.answers[0])
    assert simulation.answers[-1] == simulation.shutdowns()
    assert len(simulation.shutdowns()) == 1
    assert simulation.search.is_finished
    failed = all(reason is ExitReason.ERRORED for reason in simulation.exits().values())
    assert simulation.shutdowns()[0].outcome == (ExitReason.ERRORED if failed else ExitReason.COMPLETED)


@given(of=any_settings, chances=all_chances, seed=seeds, data=st.data())
def test_replayed_log_gives_the_same_search(of: Searcher, chances: Chances, seed: int, data: st.DataObject) -> None:
    simulation = simulated(of, chances, seed)
    replayed = Search(of, SPACE, seed)
    assert replayed.initial() == simulation.answers[0]
    killed = data.draw(st.integers(0, len(simulation.events)), label="events before the runner is killed")
    answers = [report(replayed, event) for event in simulation.events[:killed]]
    ended = {event[0] for event in simulation.events[:killed] if len(event) == 2}
    # What is known of trials that ended changes nothing when it is reported again.
    assert not any(report(replayed, event) for event in simulation.events[:killed] if event[0] in ended)
    answers += [report(replayed, event) for event in simulation.events[killed:]]
    assert answers == simulation.answers[1:]
    assert replayed.is_finished


@given(of=any_settings, chances=all_chances, seed=seeds)
def test_retries_keep_number_and_replay(of: Searcher, chances: Chances, seed: int) -> None:
    """Failed trials that go on are counted again, and no other trials are created because of it."""
    simulation = simulated(of, dataclasses.replace(chances, error=0.2, retry=0.3), seed)
    check_number_of_trials(of, simulation)
    assert ExitReason.ERRORED not in simulation.exits().values()
    assert simulation.search.is_finished
    assert simulation.shutdowns()[-1] == Shutdown(ExitReason.COMPLETED)
    replayed = Search(of, SPACE, seed)
    assert [replayed.initial(), *(report(replayed, event) for event in simulation.events)] == simulation.answers


@given(of=any_settings, first=seeds, second=seeds, chances=all_chances)
def test_trial_k_is_the_same_in_any_order(of: Searcher, first: int, second: int, chances: Chances) -> None:
    created: list[Any] = []
    for order in (first, second):
        simulation = Simulation(Search(of, SPACE, 42), random.Random(order), chances, getattr(of, "max_time", 5))
        simulation.run()
        created.append([(trial.hparams, trial.trial_seed) for trial in simulation.created()])
    planned = [(trial.hparams, trial.trial_seed) for trial in plan_trials(of, SPACE, 42)]
    common = min(len(trials) for trials in created)
    assert created[0][:common] == created[1][:common]
    assert created[0][: len(planned)] == planned


@given(of=halving_settings, chances=harmless, seed=seeds)
def test_oracle_stops_the_same_trials(of: AdaptiveAshaSearcher, chances: Chances, seed: int) -> None:
    simulation = simulated(of, chances, seed)
    oracle = Oracle(make_brackets(of), of.divisor, of.smaller_is_better)
    for event, answer in zip(simulation.events, simulation.answers[1:], strict=True):
        stopped = [operation.trial_id for operation in answer if isinstance(operation, StopTrial)]
        expected = [event[0]] if len(event) == 3 and oracle.stops(*event) else []
        assert stopped == expected
        for operation in answer:
            if isinstance(operation, CreateTrial):
                oracle.follow(event[0], operation.trial_id)
    assert all(rungs[-1] for rungs in oracle.seen), "each bracket has a trial that trained for max_time"
