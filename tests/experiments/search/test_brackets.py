"""Brackets and rungs are those of Determined 0.38.1."""

from __future__ import annotations

from typing import Any

import pytest

from det_lightning.experiments.search.halving import make_brackets
from tests.experiments.search.spaces import searcher


def brackets(name: str = "adaptive_asha", **settings: Any) -> list[tuple[list[int], int, int]]:
    of = make_brackets(searcher(name, **settings))
    return [(list(bracket.rungs), bracket.max_trials, bracket.initial_trials) for bracket in of]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("standard", 5, 4, 16, 16, 16), [([1, 4, 16], 12, 8), ([4, 16], 4, 4)]),
        (("aggressive", 5, 4, 16, 16, 16), [([1, 4, 16], 16, 16)]),
        (("conservative", 5, 4, 16, 16, 16), [([1, 4, 16], 12, 6), ([4, 16], 3, 3), ([16], 1, 1)]),
        (("standard", 5, 4, 937, 16, 16), [([58, 234, 937], 12, 8), ([234, 937], 4, 4)]),
        (
            ("standard", 5, 4, 6400, 512, 16),
            [([25, 100, 400, 1600, 6400], 363, 6), ([100, 400, 1600, 6400], 112, 5), ([400, 1600, 6400], 37, 5)],
        ),
        (
            ("standard", 5, 4, 1000, 100, 16),
            [([15, 62, 250, 1000], 70, 6), ([62, 250, 1000], 22, 5), ([250, 1000], 8, 5)],
        ),
        (("standard", 5, 4, 64, 50, 0), [([4, 16, 64], 37, 13), ([16, 64], 13, 13)]),
        (("standard", 5, 4, 100, 10, 2), [([25, 100], 7, 1), ([100], 3, 1)]),
        (("conservative", 5, 3, 1000, 10, 5), [([111, 333, 1000], 7, 2), ([333, 1000], 2, 2), ([1000], 1, 1)]),
        (("aggressive", 2, 2, 400, 5, 16), [([200, 400], 5, 5)]),
        (("conservative", 5, 4, 16, 16, 0), [([1, 4, 16], 12, 4), ([4, 16], 3, 3), ([16], 1, 1)]),
        (("conservative", 5, 4, 16, 16, 1), [([1, 4, 16], 12, 1), ([4, 16], 3, 1), ([16], 1, 1)]),
    ],
)
def test_adaptive_asha_has_these_brackets(settings: tuple[Any, ...], expected: Any) -> None:
    names = ("mode", "max_rungs", "divisor", "max_time", "max_trials", "max_concurrent_trials")
    assert brackets(**dict(zip(names, settings, strict=True))) == expected


TWO = [(50, 3, (4, 3), [35, 15]), (50, 4, (3, 2), [37, 13])]
THREE = [(20, 3, (3, 2, 1), [12, 5, 3]), (100, 4, (4, 3, 2), [70, 22, 8]), (2, 4, (5, 3, 1), [1, 1, 1])]


@pytest.mark.parametrize(("max_trials", "divisor", "rungs", "trials"), [*TWO, *THREE])
def test_given_brackets_divide_the_trials(max_trials: int, divisor: float, rungs: Any, trials: list[int]) -> None:
    divided = brackets(max_trials=max_trials, divisor=divisor, bracket_rungs=[*rungs[::-1]], max_time=1000)
    assert [len(lengths) for lengths, _, _ in divided] == list(rungs)
    assert [count for _, count, _ in divided] == trials


@pytest.mark.parametrize(("divisor", "max_time", "num_rungs"), [(3, 243, 5), (10, 1000, 3), (3, 244, 6), (4, 4**5, 6)])
def test_rungs_follow_from_float_logarithms(divisor: float, max_time: int, num_rungs: int) -> None:
    (bracket,) = brackets(mode="aggressive", max_rungs=99, divisor=divisor, max_time=max_time, max_trials=10**9)
    assert len(bracket[0]) == num_rungs


THIRDS = [(1, 3, 9, [9]), (3, 3, 9, [1, 3, 9]), (3, 3, 900, [100, 300, 900])]
OTHERS = [(4, 2, 10, [1, 2, 5, 10]), (3, 5, 1000, [40, 200, 1000]), (3, 4, 1, [1, 1, 1]), (3, 1.5, 10, [4, 6, 10])]


@pytest.mark.parametrize(("num_rungs", "divisor", "max_time", "lengths"), [*THIRDS, *OTHERS])
def test_async_halving_has_one_bracket(num_rungs: int, divisor: float, max_time: int, lengths: list[int]) -> None:
    of = brackets("async_halving", num_rungs=num_rungs, divisor=divisor, max_time=max_time, max_trials=40)
    assert of == [(lengths, 40, 16)]


@pytest.mark.parametrize(("max_trials", "at_once", "initial"), [(40, 16, 16), (5, 16, 5), (40, 0, 9), (4, 0, 4)])
def test_async_halving_starts_enough_trials(max_trials: int, at_once: int, initial: int) -> None:
    trials = {"max_trials": max_trials, "max_concurrent_trials": at_once}
    of = brackets("async_halving", num_rungs=3, divisor=3, max_time=9, **trials)
    assert of == [([1, 3, 9], max_trials, initial)]
