"""Hyperparameters: what is drawn, in which order, and the points of a grid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from det_lightning.experiments.search.generator import Generator
from det_lightning.experiments.search.powers import raise_to_power
from det_lightning.experiments.search.space import Grid, draw
from tests.experiments.search.spaces import choice, constant, integer, number, power


def points(space: dict[str, Any]) -> list[dict[str, Any]]:
    grid = Grid(space)
    return [grid.point(index) for index in range(grid.size)]


def test_draws_are_in_alphabetical_order() -> None:
    space: dict[str, Any] = {
        "b": integer(0, 9),
        "a": {"z": number(0, 1), "y": choice("p", "q", "r")},
        "B": power(-4, -1, 10),
    }
    state = np.random.RandomState(7)
    drawn_power = raise_to_power(10, state.uniform(-4, -1))
    chosen = ("p", "q", "r")[state.randint(0, 3)]
    drawn_number = state.uniform(0, 1)
    drawn_integer = state.randint(0, 10)
    assert draw(space, Generator(7)) == {"a": {"y": chosen, "z": drawn_number}, "b": drawn_integer, "B": drawn_power}


@pytest.mark.parametrize("val", [None, True, "text", [1, [2]], {"type": "anything"}, 1.0])
def test_constant_keeps_its_value_and_draws_nothing(val: Any) -> None:
    generator = Generator(1)
    assert draw({"x": constant(val)}, generator) == {"x": val}
    assert generator.word() == Generator(1).word()
    assert points({"x": constant(val)}) == [{"x": val}]


@pytest.mark.parametrize(
    ("hyperparameter", "values"),
    [
        (integer(1, 10, count=4), [1, 4, 7, 10]),
        (integer(0, 5, count=3), [0, 3, 5]),
        (integer(-5, 0, count=3), [-5, -3, 0]),
        (integer(1, 3, count=100), [1, 2, 3]),
        (integer(0, 5, count=1), [3]),
        (integer(-5, 0, count=1), [-3]),
        (number(0, 1, count=3), [0, 0.5, 1]),
        (number(-1, 2, count=1), [0.5]),
        (power(-3, -1, 10, count=3), [1e-3, 1e-2, 1e-1]),
        (power(0, 4, 2, count=1), [4]),
        (choice(2, 1, None), [2, 1, None]),
    ],
    ids=str,
)
def test_grid_has_both_ends_or_the_middle(hyperparameter: Any, values: list[Any]) -> None:
    assert [point["x"] for point in points({"x": hyperparameter})] == values[::-1]


def test_grid_runs_from_last_to_first() -> None:
    space = {"b": choice(1, 2, 3), "a": choice("x", "y")}
    assert [(point["a"], point["b"]) for point in points(space)] == [(a, b) for a in "yx" for b in (3, 2, 1)]
    assert points({}) == [{}]


def test_groups_are_axes_of_a_grid() -> None:
    space: dict[str, Any] = {"n": {"b": integer(0, 1, count=2), "a": {}, "c": {"d": choice(3, 4)}}, "k": constant(9)}
    expected = [(1, 4), (1, 3), (0, 4), (0, 3)]
    assert points(space) == [{"k": 9, "n": {"a": {}, "b": b, "c": {"d": d}}} for b, d in expected]


def test_grid_larger_than_memory_can_be_walked() -> None:
    grid = Grid({str(axis): integer(0, 9, count=10) for axis in range(10, 40)})
    assert grid.size == 10**30
    assert set(grid.point(10**30 - 1).values()) == {0}
