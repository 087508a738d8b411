"""What of the searcher section is converted, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from det_lightning.experiments.search import Int, Length, Search, SearcherSettings


def search(name: str, **settings: Any) -> Search:
    return Search(SearcherSettings(name, "loss", **settings), {}, 0)


@pytest.mark.parametrize("unit", ["batches", "epochs", "records"])
def test_a_length_becomes_time_with_validations_at_the_rungs(unit: str) -> None:
    asha = search("adaptive_asha", max_trials=16, max_length=Length(16, unit))
    assert (asha.settings.max_time, asha.settings.time_metric) == (16, unit)
    assert asha.settings.force_validations
    assert asha.warnings == []


def test_a_length_without_a_unit_is_in_batches() -> None:
    asha = search("async_halving", max_trials=4, num_rungs=2, max_length=Length(8))
    assert (asha.settings.max_time, asha.settings.time_metric) == (8, "batches")
    assert asha.warnings == ["searcher.max_length has no unit; it is taken as a number of batches."]


def test_time_comes_before_a_length_and_a_difference_is_a_warning() -> None:
    time: dict[str, Any] = {"max_trials": 4, "max_time": 8, "time_metric": "batches"}
    assert search("adaptive_asha", **time, max_length=Length(8, "batches")).warnings == []
    assert search("adaptive_asha", **time, max_length=Length(1, "epochs")).warnings == []
    differing = search("adaptive_asha", **time, max_length=Length(6, "batches"))
    assert "max_length is 6 batches and max_time is 8" in differing.warnings[0]
    assert differing.settings.max_time == 8
    assert not differing.settings.force_validations


def test_adaptive_simple_becomes_adaptive_asha() -> None:
    simple = search("adaptive_simple", max_trials=16, max_length=Length(16, "epochs"), divisor=3, mode="aggressive")
    assert simple.settings.name == "adaptive_asha"
    assert (simple.settings.divisor, simple.settings.mode) == (3, "aggressive")
    assert "adaptive_asha runs in its place" in simple.warnings[0]


@pytest.mark.parametrize("name", ["adaptive", "sync_halving", "pbt", "custom"])
def test_what_was_removed_is_refused_with_what_to_write_instead(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^searcher.name: Determined removed {name}; write \w+"):
        search(name)


@pytest.mark.parametrize(
    ("name", "settings", "mistake"),
    [
        ("bayes", {}, "searcher.name is 'bayes'; expected one of single, random, grid, adaptive_asha, async_halving"),
        ("random", {}, "searcher.max_trials is missing or too small; random needs at least 1"),
        ("grid", {"max_concurrent_trials": -1}, "searcher.max_concurrent_trials"),
        ("adaptive_asha", {}, "searcher.max_time is missing"),
        ("adaptive_asha", {"max_time": 9}, "searcher.time_metric is missing"),
        ("adaptive_asha", {"max_length": Length(0, "epochs")}, "searcher.max_time is missing or too small"),
        ("adaptive_asha", {"max_rungs": 0}, "searcher.max_rungs"),
        ("adaptive_asha", {"mode": "fast"}, "searcher.mode is 'fast'; expected one of aggressive, standard, conserv"),
        ("adaptive_asha", {"bracket_rungs": (2, 0)}, r"searcher.bracket_rungs is \[2, 0\]"),
        ("adaptive_asha", {"divisor": 1.0}, "searcher.divisor is 1.0; expected a number above 1"),
        ("async_halving", {}, "searcher.num_rungs is missing"),
        ("async_halving", {"num_rungs": 1000}, "searcher.divisor is 4.0: its powers for 1000 rungs are too large"),
    ],
)
def test_a_mistake_is_refused(name: str, settings: dict[str, Any], mistake: str) -> None:
    with pytest.raises(ValueError, match=mistake):
        search(name, **settings)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ValueError) as refused:
        Search(SearcherSettings("adaptive_asha", "loss", divisor=0.5, mode="slow"), {"x": Int(2, 1)}, 0)
    for culprit in ("max_trials", "max_time", "time_metric", "divisor", "mode", "hyperparameters.x"):
        assert culprit in str(refused.value)
