"""``--config a.b=v``."""

from __future__ import annotations

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
        ("a.b=", {"a": {"b": None, "c": 2}}),
        ("a.b=x=y", {"a": {"b": "x=y", "c": 2}}),
        ("a.b=1,x,true", {"a": {"b": [1, "x", True], "c": 2}}),
        ("a.b=[1, {x: 2}]", {"a": {"b": [1, {"x": 2}], "c": 2}}),
        ("a={b: 3, d: 4}", {"a": {"b": 3, "c": 2, "d": 4}}),
        ("a.b.x.y=1", {"a": {"b": {"x": {"y": 1}}, "c": 2}}),
        ("n.x=1", {"n": {"x": 1}}),
        ("bind_mounts={host_path: /a}", {"bind_mounts": [{"host_path": "/a"}]}),
        ("bind_mounts=[{host_path: /a}]", {"bind_mounts": [{"host_path": "/a"}]}),
    ],
)
def test_an_override_replaces_a_value_and_leaves_the_rest(override: str, changed: dict[str, Any]) -> None:
    data = {"a": {"b": 1, "c": 2}, "n": None}
    assert with_overrides(data, [override]) == {**data, **changed}
    assert data == {"a": {"b": 1, "c": 2}, "n": None}


def test_later_overrides_go_before_earlier_ones() -> None:
    assert with_overrides({}, ["a.b=1", "a.c=2", "a.b=3"]) == {"a": {"b": 3, "c": 2}}


def test_an_override_of_a_deep_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="has more than 50 names"):
        with_overrides({"a": {}}, [".".join("a" * 5000) + "=1"])


def test_overrides_that_cannot_be_read_are_reported_together() -> None:
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


def test_older_spellings_work_in_overrides() -> None:
    assert read_part("batches_per_step: 100", "min_validation_period=3").min_validation_period.as_plain() == {
        "batches": 300
    }


def test_a_mistake_in_an_override_has_no_line_of_the_file() -> None:
    found = mistakes_in("resources:\n  slots_per_trial: 1\n  max_slots: a", "resources.slots_per_trial=b", "debg=1")
    assert [(mistake.line, mistake.path) for mistake in found] == [
        (None, "debg"),
        (None, "resources.slots_per_trial"),
        (3, "resources.max_slots"),
    ]
