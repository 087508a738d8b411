"""The search space of a configuration: a random draw of the hyperparameters, and the grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from det_lightning.experiments.search.generator import Generator
from det_lightning.experiments.search.powers import raise_to_power

if TYPE_CHECKING:
    from det_lightning.config.hyperparameters import Hyperparameter, Leaf

    SearchSpace = Mapping[str, Hyperparameter]


def draw(space: SearchSpace, generator: Generator) -> dict[str, Any]:
    """Return a random value for each hyperparameter, drawn in the order of the names.

    Determined has no fixed order inside a group, so grouped hyperparameters have other values there.
    """
    drawn = {}
    for name in sorted(space):
        inner = space[name]
        drawn[name] = draw(inner, generator) if isinstance(inner, Mapping) else _draw_value(inner, generator)
    return drawn


def _draw_value(leaf: Leaf, generator: Generator) -> Any:
    if leaf.type == "const":
        return leaf.val
    if leaf.type == "categorical":
        return leaf.vals[generator.below(len(leaf.vals))]
    if leaf.type == "int":
        return leaf.minval + generator.below(leaf.maxval - leaf.minval + 1)
    number = generator.uniform(leaf.minval, leaf.maxval)
    return number if leaf.type == "double" else raise_to_power(leaf.base, number)


def list_values(leaf: Leaf) -> list[Any]:
    """Return the values of a hyperparameter in a grid, both ends of a range included."""
    if leaf.type == "const":
        return [leaf.val]
    if leaf.type == "categorical":
        return list(leaf.vals)
    numbers = _space_evenly(leaf.minval, leaf.maxval, leaf.values_of_grid() or 1)
    if leaf.type == "int":
        return [_round(number) for number in numbers]
    return numbers if leaf.type == "double" else [raise_to_power(leaf.base, number) for number in numbers]


class Grid:
    """All combinations of the grid values, in Determined's order: from the last to the first.

    The first name in alphabetical order changes slowest. There may be more combinations than fit into memory.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._axes = [(path, list_values(leaf) if leaf else [{}]) for path, leaf in _walk(space)]

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


def _walk(space: SearchSpace, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Leaf | None]]:
    """Yield each hyperparameter that is not a group with the path to it; None stands for an empty group."""
    for name in sorted(space):
        inner = space[name]
        path = (*above, name)
        if not isinstance(inner, Mapping):
            yield path, inner
        elif inner:
            yield from _walk(inner, path)
        else:
            yield path, None


def _space_evenly(minval: float, maxval: float, count: int) -> list[float]:
    if count == 1:
        return [(minval + maxval) / 2]
    return [minval + i * (maxval - minval) / (count - 1) for i in range(count)]


def _round(value: float) -> int:
    """Return the nearest integer; halves are rounded away from 0, unlike with Python's ``round``."""
    whole = math.trunc(value)
    return whole if abs(value - whole) < 0.5 else whole + (1 if value > 0 else -1)
