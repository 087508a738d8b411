"""The search space: hyperparameters, one random draw of them, and their grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from det_lightning.experiments.search.generator import Generator
from det_lightning.experiments.search.powers import raise_to_power


@dataclass(frozen=True)
class Const:
    """A value of any type that every trial gets."""

    val: Any

    def draw(self, generator: Generator) -> Any:
        return self.val

    def grid(self) -> list[Any]:
        return [self.val]


@dataclass(frozen=True)
class Categorical:
    """One of several values of any type."""

    vals: tuple[Any, ...]

    def draw(self, generator: Generator) -> Any:
        return self.vals[generator.below(len(self.vals))]

    def grid(self) -> list[Any]:
        return list(self.vals)


@dataclass(frozen=True)
class Int:
    """An integer from ``minval`` to ``maxval``, inclusive; a grid has ``count`` of them."""

    minval: int
    maxval: int
    count: int | None = None

    def draw(self, generator: Generator) -> int:
        return self.minval + generator.below(self.maxval - self.minval + 1)

    def grid(self) -> list[int]:
        count = min(self.count or 1, self.maxval - self.minval + 1)
        return [_rounded(value) for value in _evenly(self.minval, self.maxval, count)]


@dataclass(frozen=True)
class Double:
    """A float in [minval, maxval); a grid has ``count`` of them, including ``maxval``."""

    minval: float
    maxval: float
    count: int | None = None

    def draw(self, generator: Generator) -> float:
        return generator.uniform(self.minval, self.maxval)

    def grid(self) -> list[float]:
        return _evenly(self.minval, self.maxval, self.count or 1)


@dataclass(frozen=True)
class Log:
    """``base`` to the power of a float in [minval, maxval); a grid has ``count`` of them, including ``maxval``."""

    minval: float
    maxval: float
    base: float
    count: int | None = None

    def draw(self, generator: Generator) -> float:
        return raise_to_power(self.base, generator.uniform(self.minval, self.maxval))

    def grid(self) -> list[float]:
        return [raise_to_power(self.base, exponent) for exponent in _evenly(self.minval, self.maxval, self.count or 1)]


Distribution = Const | Categorical | Int | Double | Log
#: A mapping is a nest: a group of hyperparameters, each drawn separately.
Hyperparameter = Distribution | Mapping[str, "Hyperparameter"]
SearchSpace = Mapping[str, Hyperparameter]


def draw(space: SearchSpace, generator: Generator) -> dict[str, Any]:
    """Return a random value for each hyperparameter, drawn in the order of the names.

    Determined has no fixed order inside a nest, so nested hyperparameters have other values there.
    """
    drawn = {}
    for name in sorted(space):
        inner = space[name]
        drawn[name] = draw(inner, generator) if isinstance(inner, Mapping) else inner.draw(generator)
    return drawn


class Grid:
    """All combinations of the grid values, in the order in which Determined tries them: from the last to the first.

    The first name in alphabetical order changes slowest. There may be more combinations than fit into memory.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._axes: list[tuple[tuple[str, ...], list[Any]]] = [
            (path, leaf.grid() if leaf else [{}]) for path, leaf in _leaves(space)
        ]

    @property
    def size(self) -> int:
        """The number of combinations."""
        return math.prod(len(values) for _, values in self._axes)

    def point(self, index: int) -> dict[str, Any]:
        """Return the combination at ``index``, in the order of trying."""
        position = self.size - 1 - index
        chosen: list[Any] = []
        for _, values in reversed(self._axes):
            position, of_axis = divmod(position, len(values))
            chosen.append(values[of_axis])
        hparams: dict[str, Any] = {}
        for (path, _), value in zip(self._axes, reversed(chosen), strict=True):
            nest = hparams
            for name in path[:-1]:
                nest = nest.setdefault(name, {})
            nest[path[-1]] = value
        return hparams


def _leaves(space: SearchSpace, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Distribution | None]]:
    """Yield each hyperparameter that is not a nest with its path; None stands for an empty nest."""
    for name in sorted(space):
        inner = space[name]
        path = (*above, name)
        if not isinstance(inner, Mapping):
            yield path, inner
        elif inner:
            yield from _leaves(inner, path)
        else:
            yield path, None


def _evenly(minval: float, maxval: float, count: int) -> list[float]:
    if count == 1:
        return [(minval + maxval) / 2]
    return [minval + i * (maxval - minval) / (count - 1) for i in range(count)]


def _rounded(value: float) -> int:
    """Return the nearest integer, or of two the one further from 0; Python's ``round`` prefers the even one."""
    whole = math.trunc(value)
    return whole if abs(value - whole) < 0.5 else whole + (1 if value > 0 else -1)
