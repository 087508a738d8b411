"""The searches, their defaults, and the searches that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from det_lightning.config.searchers import HalvingSearcher
from det_lightning.errors import ConfigError
from tests.config.configurations import mistakes_in, read_alone, read_part

COMMON = dict.fromkeys(("source_trial_id", "source_checkpoint_uuid", "max_length"))
COMMON |= {"metric": "loss", "smaller_is_better": True}
HALVING = {"max_trials": 16, "max_time": 100, "time_metric": "batches", "divisor": 4, "max_concurrent_trials": 16}
HALVING |= {**COMMON, "stop_once": False}


def searcher_of(text: str) -> Any:
    return read_part(f"searcher: {text}").searcher


@pytest.mark.parametrize(
    ("text", "defaulted"),
    [
        ("{name: single, metric: loss}", {**COMMON, "name": "single"}),
        (
            "{name: single, metric: loss, max_length: {epochs: 3}, source_checkpoint_uuid: a}",
            {**COMMON, "name": "single", "max_length": {"epochs": 3}, "source_checkpoint_uuid": "a"},
        ),
        (
            "{name: random, metric: loss, max_trials: 9, max_length: 100}",
            {**COMMON, "name": "random", "max_trials": 9, "max_concurrent_trials": 16, "max_length": 100},
        ),
        (
            "{name: grid, metric: loss, smaller_is_better: false, max_concurrent_trials: 0}",
            {**COMMON, "name": "grid", "max_concurrent_trials": 0, "smaller_is_better": False},
        ),
        (
            "{name: adaptive_asha, metric: loss, max_trials: 16, max_time: 100, time_metric: batches}",
            {**HALVING, "name": "adaptive_asha", "mode": "standard", "max_rungs": 5, "bracket_rungs": []},
        ),
        (
            "{name: async_halving, metric: loss, max_trials: 16, max_time: 100, time_metric: batches, num_rungs: 3}",
            {**HALVING, "name": "async_halving", "num_rungs": 3},
        ),
    ],
)
def test_searches_have_platform_defaults(text: str, defaulted: dict[str, Any]) -> None:
    assert searcher_of(text).model_dump() == defaulted


@pytest.mark.parametrize(
    ("given", "clock", "full_time", "validates_at_rungs"),
    [
        ("max_time: 100, time_metric: batches", "batches", 100, False),
        ("max_time: 7, time_metric: seen, max_length: {epochs: 7}", "seen", 7, False),
        ("max_length: {records: 1000}", "records", 1000, True),
        ("max_length: 50", "batches", 50, True),
    ],
)
def test_lengths_give_the_time(given: str, clock: str, full_time: int, validates_at_rungs: bool) -> None:
    searcher = searcher_of(f"{{name: adaptive_asha, metric: loss, max_trials: 4, {given}}}")
    assert isinstance(searcher, HalvingSearcher)
    assert (searcher.clock, searcher.full_time, searcher.validates_at_rungs) == (clock, full_time, validates_at_rungs)


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("{name: adaptive, max_length: {batches: 9}, budget: {batches: 90}}", "name", "write name: adaptive_asha, and"),
        ("{name: pbt, population_size: 4, num_rounds: 3}", "name", "there is no population-based training"),
        ("{name: custom, unit: batches, metric: a}", "name", "write the name of another search"),
        ("{name: adaptive_ahsa, metric: a}", "name", "unknown name 'adaptive_ahsa'; did you mean adaptive_asha?"),
        ("{name: random, metric: a}", "max_trials", "is missing"),
        (
            "{name: grid, metric: a, max_trials: 3}",
            "max_trials",
            "unknown key here; it is a key of random, adaptive",
        ),
        ("{name: single, max_length: {batches: 0}}", "max_length.batches", "an integer, at least 1; got 0"),
        ("{name: adaptive_asha, max_trials: 4}", "max_time", "is missing: write max_time and time_metric"),
        ("{name: adaptive_asha, max_trials: 4, max_time: 9}", "time_metric", "is missing beside max_time"),
        ("{name: adaptive_asha, max_trials: 4, time_metric: epochs}", "max_time", "how many epochs a trial trains"),
        ("{name: async_halving, max_trials: 4, max_length: 9}", "num_rungs", "is missing"),
        ("{name: adaptive_asha, max_trials: 4, max_length: 9, mode: fast}", "mode", "must be 'aggressive', 'standard'"),
        ("{name: adaptive_asha, max_trials: 4, max_length: 9, divisor: 1}", "divisor", "greater than 1"),
        ("{name: adaptive_asha, max_trials: 4, max_length: 9, divisor: 1e9}", "divisor", "must be at most 1000; got"),
        ("{name: adaptive_asha, max_trials: 4, max_length: 9, bracket_rungs: [2, 600]}", "bracket_rungs[1]", "got 600"),
    ],
)
def test_refused_searches_get_advice(text: str, path: str, message: str) -> None:
    (mistake,) = mistakes_in(f"searcher: {text}")
    assert (mistake.line, mistake.path) == (1, f"searcher.{path}")
    assert message in mistake.message


BATCH_SIZE = "hyperparameters.global_batch_size"


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("searcher: {max_length: 100}", "searcher.max_length", "needs a unit for a trial class, such as {batches: 10"),
        ("searcher: {max_length: {records: 9}}", "searcher.max_length.records", "no hyperparameter global_batch_size"),
        ("min_validation_period: {records: 9}", "min_validation_period.records", "no hyperparameter global_batch_size"),
        ("hyperparameters: {global_batch_size: {type: categorical, vals: [8, 'x']}}", BATCH_SIZE, "at least 1, for a"),
        (
            "hyperparameters: {global_batch_size: {type: int, minval: 0, maxval: 9}}",
            BATCH_SIZE,
            "for a trial class; got 0",
        ),
        (
            "searcher: {name: adaptive_asha, max_trials: 4, max_time: 9, time_metric: seen}",
            "searcher.time_metric",
            "must be batches or epochs for a trial class without max_length; got seen",
        ),
    ],
)
@pytest.mark.parametrize("entrypoint", ["model_def:T", "python3 -m determined.launch.torch_distributed --trial m:T"])
def test_trial_classes_need_usable_lengths_and_batch_sizes(entrypoint: str, text: str, path: str, message: str) -> None:
    (mistake,) = mistakes_in(f"entrypoint: {entrypoint}\n{text}")
    assert (mistake.line, mistake.path) == (2, path)
    assert message in mistake.message


def test_a_command_may_have_such_lengths() -> None:
    read_alone("""
        entrypoint: python3 train.py
        min_validation_period: {records: 9}
        searcher: {name: adaptive_asha, metric: a, max_trials: 4, max_time: 9, time_metric: seen, max_length: 100}
    """)


@pytest.mark.parametrize(
    ("text", "given", "notes"),
    [
        ("entrypoint: model_def:T", "", ["max_time: no trial is stopped early"]),
        ("entrypoint: model_def:T\nmin_validation_period: {batches: 1}", "", []),
        ("entrypoint: python3 train.py", "", []),
        ("", "max_length: {epochs: 100}", ["max_length: differs from max_time"]),
        ("", "stop_once: true", ["stop_once: has no effect"]),
    ],
)
def test_doubtful_fields_are_noted(text: str, given: str, notes: list[str]) -> None:
    search = f"{{name: adaptive_asha, metric: a, max_trials: 4, max_time: 100, time_metric: batches, {given}}}"
    found = read_part(f"searcher: {search}\n{text}").notes
    assert len(found) == len(notes)
    for note, expected in zip(found, notes, strict=True):
        assert str(note).startswith(f"line 1: searcher.{expected}")


def test_a_length_without_a_unit_counts_steps() -> None:
    (note,) = read_part("searcher: {name: adaptive_asha, metric: a, max_trials: 4, max_length: 20}").notes
    assert str(note).startswith("line 1: searcher.max_length: counts the steps_completed")


def test_platform_trials_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"source_trial_id: .* as source_checkpoint_uuid"):
        read_alone("entrypoint: python3 train.py\nsearcher: {name: single, metric: loss, source_trial_id: 3}")
