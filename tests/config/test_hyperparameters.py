"""Constants, ranges, choices and groups."""

from __future__ import annotations

from typing import Any

import pytest

from det_lightning.config.hyperparameters import Categorical, Const, Double, Int, Log
from tests.config.configurations import mistakes_in, read_part


def hyperparameters_of(text: str) -> dict[str, Any]:
    return read_part(f"hyperparameters: {text}").hyperparameters


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("3", Const(val=3)),
        ("[1, {type: int}]", Const(val=[1, {"type": "int"}])),
        ("{type: const, val: {a: b}}", Const(val={"a": "b"})),
        ("{type: int, minval: -4.0, maxval: 4, count: 3}", Int(minval=-4, maxval=4, count=3)),
        ("{type: int, minval: 1, maxval: 4, count: 2000000}", Int(minval=1, maxval=4, count=2000000)),
        ("{type: double, minval: 0, maxval: 0.5, count: null}", Double(minval=0, maxval=0.5)),
        ("{type: log, minval: -4, maxval: -1, base: 10}", Log(minval=-4, maxval=-1, base=10)),
        ("{type: categorical, vals: [a, 1, null, [2], {b: 3}]}", Categorical(vals=["a", 1, None, [2], {"b": 3}])),
        ("9007199254740993", Const(val=2**53)),
        ("{type: int, minval: 0, maxval: 9223372036854775807}", Int(minval=0, maxval=2**63 - 1)),
        ("{b: {c: 1}, d: {}}", {"b": {"c": Const(val=1)}, "d": {}}),
    ],
)
def test_entries_read_as_on_the_platform(text: str, entry: Any) -> None:
    assert hyperparameters_of(f"{{a: {text}}}") == {"a": entry}


def test_untyped_integers_are_rounded() -> None:
    values = "[9007199254740992, 9007199254740993, 1234567890123456789, 1000000000000000000001]"
    expected = [2**53, 2**53, 1234567890123456800, 1e21]
    config = read_part(f"""
        hyperparameters: {{a: {values}, b: {{type: categorical, vals: {values}}}, c: {{d: 9007199254740993}}}}
        data: {{values: {values}}}
        max_restarts: 9007199254740993
        min_validation_period: {{batches: 9223372036854775807}}
    """)
    plain = config.as_dict()
    assert plain["hyperparameters"]["a"]["val"] == plain["hyperparameters"]["b"]["vals"] == expected
    assert type(plain["hyperparameters"]["a"]["val"][-1]) is float
    assert plain["hyperparameters"]["c"]["d"]["val"] == 2**53
    assert plain["data"] == {"values": expected}
    assert (config.max_restarts, config.min_validation_period.units) == (2**53 + 1, 2**63 - 1)


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("{type: int, minval: 1}", "a.maxval", "is missing"),
        ("{type: int, minval: 1, maxval: 1}", "a.maxval", "must be greater than minval, 1; got 1"),
        ("{type: log, minval: -1, maxval: 1, base: 0}", "a.base", "must be greater than 0; got 0"),
        ("{type: int, minval: 1, maxval: 2, count: 0}", "a.count", "must be at least 1; got 0"),
        ("{type: int, minval: -9e18, maxval: 9e18}", "a.maxval", "must be less than 2**63 above minval, -9000000"),
        ("{type: int, minval: 0, maxval: 1e300}", "a.maxval", "must be less than 9223372036854775808; got"),
        ("{type: double, minval: -1e308, maxval: 1e308}", "a.maxval", "must be closer to minval, -1e+308; got 1e+308"),
        ("{type: double, minval: 0, maxval: 1, count: 1000001}", "a.count", "must be at most 1000000; got 1000001"),
        ("{type: int, minval: 0, maxval: 1000000, count: 2000000}", "a.count", "must be at most 1000000"),
        ("{type: log, minval: 0, maxval: 400, base: 10}", "a.maxval", "too large an exponent of the base, 10; got 400"),
        ("{type: int, minval: 1, maxval: 2, min: 0}", "a.min", "unknown key"),
        ("{type: categorical, vals: []}", "a.vals", "must not be empty; got []"),
        ("{type: flot, minval: 1}", "a.type", "unknown type 'flot'"),
        ("{type: {b: 1}}", "a.type", "a group cannot have a member named type"),
        ("{b: {c: {type: int, minval: 1}}}", "a.b.c.maxval", "is missing"),
    ],
)
def test_undrawable_entries_are_refused(text: str, path: str, message: str) -> None:
    (mistake,) = mistakes_in(f"debug: false\nhyperparameters:\n  a: {text}")
    assert (mistake.line, mistake.path) == (3, f"hyperparameters.{path}")
    assert message in mistake.message


@pytest.mark.parametrize(
    ("entry", "doubt"),
    [
        ("{minval: 1, maxval: 2}", "is a group of hyperparameters; a range needs a type: int, double, log or"),
        ("{type: log, minval: 0.0001, maxval: 0.1, base: 10}", "is drawn from 1 to 1.259: minval and maxval are expo"),
    ],
)
def test_probable_mistakes_are_noted(entry: str, doubt: str) -> None:
    (note,) = read_part(f"debug: false\nhyperparameters:\n  group: {{lr: {entry}}}").notes
    assert (note.line, note.path) == (3, "hyperparameters.group.lr")
    assert note.message.startswith(doubt)


def test_grids_need_counts() -> None:
    found = mistakes_in("""
        searcher: {name: grid}
        hyperparameters:
          a: {type: int, minval: 1, maxval: 9, count: 3}
          b: {type: int, minval: 1, maxval: 9}
          c: {type: categorical, vals: [1]}
          d:
            e: {type: double, minval: 1, maxval: 9}
            f: {g: {type: log, minval: 1, maxval: 9, base: 2, count: null}}
          h: 3
    """)
    assert [(mistake.line, mistake.path) for mistake in found] == [
        (4, "hyperparameters.b.count"),
        (7, "hyperparameters.d.e.count"),
        (8, "hyperparameters.d.f.g.count"),
    ]
