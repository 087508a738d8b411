"""Which values JSON can hold, what becomes of others, and how numbers that JSON lacks are written."""

from __future__ import annotations

import collections
import enum
import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.files.plain_values import MOST_IN_SETTINGS, NotPlainError, as_plain
from det_lightning.files.strict_json import read_numbers, spell_numbers, to_json

Mode = enum.Enum("Mode", {"fast": "fast"}, type=str)
Level = enum.IntEnum("Level", {"high": 3})


class Items(collections.UserList[Any]):
    """A list of a configuration library, which is no list."""


class Options(collections.UserDict[str, Any]):
    """A dict of a configuration library, which is no dict."""


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.bool_(False), False),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.str_("adam"), "adam"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.ones(2, requires_grad=True), [1.0, 1.0]),
        ((1, (2, None)), [1, [2, None]]),
        (collections.deque([1, 2]), [1, 2]),
        (Items([1, Options(a=np.int8(2))]), [1, {"a": 2}]),
        (Mode.fast, "fast"),
        (Level.high, 3),
        ({1: "a", None: "b", False: "c", np.int64(4): "d"}, {"1": "a", "null": "b", "false": "c", "4": "d"}),
    ],
)
def test_json_values_are_stored(value: Any, plain: Any) -> None:
    found = as_plain({"it": value})["it"]
    assert found == plain
    assert json.loads(to_json(found)) == plain
    assert type(found) is type(plain)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({1, 2}, "is a set"),
        (b"raw", "is a bytes"),
        (np.complex64(1j), "is a numpy.complex64, of complex64"),
        (np.datetime64("2020-01-01", "ns"), r"is a numpy.datetime64, of datetime64\[ns\]"),
        (np.array([object()]), "is a numpy.ndarray, of object"),
        (torch.zeros(2, device="meta"), "is a torch.Tensor"),
        (torch.nn.ReLU(), "is a torch.nn.modules.activation.ReLU"),
        (len, "is a builtin_function_or_method"),
        (pathlib.Path("data"), "is a pathlib.*Path"),
        (np.zeros(MOST_IN_SETTINGS + 1), "with 10,001 numbers"),
        ([1, [2, {3}]], r"\['it'\]\[1\]\[1\] is a set"),
    ],
)
def test_anything_else_is_left_out_and_named(value: Any, named: str) -> None:
    losses: list[str] = []
    assert as_plain({"lr": 0.1, "it": value}, "hparams", losses, MOST_IN_SETTINGS) == {"lr": 0.1}
    (note,) = losses
    with pytest.raises(NotPlainError, match=named):
        raise NotPlainError("", "", note)
    with pytest.raises(TypeError, match=rf"hparams\['it'\].*{named.rpartition(']')[2]}"):
        as_plain({"it": value}, "hparams", most_numbers=MOST_IN_SETTINGS)


def test_values_in_themselves_are_left_out() -> None:
    endless: list[Any] = []
    endless.append(endless)
    losses: list[str] = []
    assert as_plain({"a": endless, "b": 1}, "hparams", losses) == {"b": 1}
    assert "nested over 99 deep" in losses[0]


def test_keys_that_json_lacks_are_named() -> None:
    losses: list[str] = []
    assert as_plain({(1, 2): "pair", 3: "number", "3": "text"}, "hparams", losses) == {"3": "number"}
    said = "; ".join(losses)
    assert "hparams has keys that are not text, such as (1, 2)" in said
    assert "hparams[(1, 2)] is a value whose key is a tuple" in said
    assert "hparams['3'] is a second value" in said


numbers = st.floats() | st.integers() | st.text(max_size=3) | st.booleans() | st.none()
plain_values = st.recursive(numbers, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(plain_values)
def test_every_number_comes_back(value: Any) -> None:
    places: list[str] = []
    text = to_json(spell_numbers(value, "it", places))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert repr(read_numbers(json.loads(text, parse_constant=refuse), "it", frozenset(places))) == repr(value)
    assert to_json(value) == text


def test_nan_as_determined_writes_it() -> None:
    assert to_json({"a": [math.nan, math.inf, -math.inf, 0.5]}) == '{"a": ["NaN", "Infinity", "-Infinity", 0.5]}'


class Interpolated(dict[str, Any]):
    """A configuration whose value refers to a missing one."""

    def __getitem__(self, name: str) -> Any:
        raise KeyError(f"{name} refers to a missing value")


def test_value_that_cannot_be_looked_up() -> None:
    losses: list[str] = []
    assert as_plain({"conf": Interpolated(lr=1)}, "hparams", losses) == {"conf": {}}
    assert losses == [
        "hparams['conf']['lr'] is a value that raises KeyError when it is looked up, which JSON cannot hold"
    ]
