"""``--config a.b=v``."""

from __future__ import annotations

import re
from typing import Any

import pytest

from det_lightning.config import with_overrides
from det_lightning.errors import ConfigError
from tests.config.configurations import mistakes_in, read, read_part


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("a=1", {"a": 1}),
        ("a.b=1e-3", {"a": {"b": 0.001, "c": 2}}),
        ("a.b=null", {"a": {"c": 2}}),
        ("hyperparameters.x=null", {"hyperparameters": {"x": None}}),
        ("a.b=1,x,true", {"a": {"b": [1, "x", True], "c": 2}}),
        ("a.b=[1, {x: 2}]", {"a": {"b": [1, {"x": 2}], "c": 2}}),
        ("a={b: 3, d: 4}", {"a": {"b": 3, "c": 2, "d": 4}}),
        ("a.b.x.y=1", {"a": {"b": {"x": {"y": 1}}, "c": 2}}),
        ("n.x=1", {"n": {"x": 1}}),
        ("bind_mounts={host_path: /a}", {"bind_mounts": [{"host_path": "/a"}]}),
    ],
)
def test_overrides_replace_one_value(override: str, changed: dict[str, Any]) -> None:
    data = {"a": {"b": 1, "c": 2}, "n": None}
    assert with_overrides(data, [override]) == {**data, **changed}
    assert data == {"a": {"b": 1, "c": 2}, "n": None}


@pytest.mark.parametrize("section", ["hyperparameters", "data"])
def test_hyperparameters_may_be_called_epochs(section: str) -> None:
    data = {section: {"lr": 0.1, "epochs": 3, "pretraining": {"batches": 1}}}
    changed = with_overrides(data, [f"{section}.epochs=4", f"{section}.pretraining.records=5"])
    assert changed == {section: {"lr": 0.1, "epochs": 4, "pretraining": {"batches": 1, "records": 5}}}


def test_overrides_come_together() -> None:
    assert with_overrides({}, ["a.b=1", "a.c=2", "a.b=3"]) == {"a": {"b": 3, "c": 2}}
    with pytest.raises(ConfigError) as caught:
        with_overrides({}, ["a", "a..b=1", "=1", "b=[1", "c=.inf", "d=1"])
    assert len(caught.value.mistakes) == 5
    assert str(caught.value).startswith("--config has 5 mistakes:\n  must be name=value, with dots in name; got 'a'")
    assert "b: not YAML" in str(caught.value)


def test_overrides_go_before_the_file() -> None:
    config = read("max_restarts: 3", "max_restarts=1", "searcher.max_length.epochs=9", "searcher.metric=error")
    assert config.max_restarts == 1
    assert config.searcher.metric == "error"
    assert config.searcher.max_length is not None
    assert config.searcher.max_length.as_plain() == {"epochs": 9}
    of_steps = read_part("batches_per_step: 100", "min_validation_period=3")  # an override may be old
    assert of_steps.min_validation_period.as_plain() == {"batches": 300}


@pytest.mark.parametrize("length", ["searcher.max_length.batches=4", "searcher.max_length={batches: 4}"])
def test_another_unit_replaces_the_old(length: str) -> None:
    config = read("min_validation_period: {epochs: 1}", length, "min_validation_period.records=9")
    assert config.searcher.max_length is not None
    assert config.searcher.max_length.as_plain() == {"batches": 4}
    assert config.min_validation_period.as_plain() == {"records": 9}


@pytest.mark.parametrize(
    ("override", "mistake"),
    [
        ("searcher.max_length={batches:4}", "the key 'batches:4' has no value: write a space after the colon"),
        ("searcher.max_length={batches}", "the key 'batches' has no value: set a value, or null"),
    ],
)
def test_keys_need_values(override: str, mistake: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(mistake)):
        read("", override)


ADAPTIVE = """
    searcher:
      name: adaptive_asha
      metric: loss
      max_trials: 16
      divisor: 2
      {}
    """


@pytest.mark.parametrize("length", ["max_length: {batches: 8}", "max_time: 8\n      time_metric: batches"])
def test_another_search_drops_fields(length: str) -> None:
    searcher = read_part(ADAPTIVE.format(length), "searcher.name=single").searcher
    assert searcher.name == "single"
    assert searcher.max_length is not None
    assert searcher.max_length.as_plain() == {"batches": 8}
    random = read_part(ADAPTIVE.format(length), "searcher={name: random, max_trials: 3}").searcher
    assert (random.name, random.model_dump()["max_trials"]) == ("random", 3)
    assert mistakes_in(ADAPTIVE.format(length), "searcher.name=single", "searcher.max_trials=3")
    # A null removes a field.
    changed = ["searcher.name=grid", "searcher.max_trials=null", "searcher.divisor=null"]
    assert read_part(ADAPTIVE.format("max_length: {batches: 8}"), *changed).searcher.name == "grid"


def test_overrides_have_no_line() -> None:
    found = mistakes_in("resources:\n  slots_per_trial: 1\n  max_slots: a", "resources.slots_per_trial=b", "debg=1")
    places = [(mistake.line, mistake.path) for mistake in found]
    assert places == [(None, "debg"), (None, "resources.slots_per_trial"), (3, "resources.max_slots")]
