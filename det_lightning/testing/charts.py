"""Curves of metrics as points and ticks in the units of a picture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from det_lightning.testing.records.values import distance

Points = Sequence[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Tick:
    """A line across a chart: where, in the picture's units, and what is written beside it."""

    position: float
    label: str


@dataclasses.dataclass(frozen=True)
class Curve:
    """One side's values of a metric."""

    side: str  # whose, as "reference" or "ours"
    lines: tuple[str, ...]  # what to draw, as the points of polylines; numbers that are not finite leave gaps
    points: tuple[tuple[float, float], ...]  # the same as pairs, for marks at each value


@dataclasses.dataclass(frozen=True)
class Chart:
    """A metric over batches, of one side or both.

    Attributes:
        rows: batch, and the values of all curves, None where one has none.
    """

    title: str  # the metric's name
    across: str  # what the horizontal axis counts
    curves: tuple[Curve, ...]  # of the reference, if there is one, and of ours
    x_ticks: tuple[Tick, ...]  # of the horizontal axis
    y_ticks: tuple[Tick, ...]  # of the vertical axis
    mark: float | None  # where the first difference is, in the picture's units; None if it is not in this metric
    summary: str  # one sentence on how far the curves are apart
    rows: tuple[tuple[int, tuple[float | None, ...]], ...]

    # The picture's units; the template draws in them.
    width = 560
    height = 256
    left = 62
    right = 14
    top = 14
    bottom = 46


def make_chart(title: str, across: str, sides: Mapping[str, Points], marked_batch: int | None = None) -> Chart:
    """Draw the values of a metric.

    Args:
        title: the metric's name.
        across: what the batches are, for the axis.
        sides: the values of each side, with their batches.
        marked_batch: the batch of the first difference.
    """
    drawn = {side: points for side, points in sides.items() if points}
    tables = [dict(points) for points in drawn.values()]
    batches = sorted({batch for table in tables for batch in table})
    values = [value for table in tables for value in table.values() if math.isfinite(value)]
    x = _Axis(batches[0], batches[-1], Chart.left, Chart.width - Chart.right, whole=True)
    y = _Axis(min(values, default=0.0), max(values, default=1.0), Chart.height - Chart.bottom, Chart.top)
    return Chart(
        title=title,
        across=across,
        curves=tuple(_curve(side, points, x, y) for side, points in drawn.items()),
        x_ticks=x.ticks(),
        y_ticks=y.ticks(),
        mark=x.position(marked_batch) if marked_batch in batches and marked_batch is not None else None,
        summary=_summary(*tables) if len(tables) > 1 else "",
        rows=tuple((batch, tuple(table.get(batch) for table in tables)) for batch in batches),
    )


class _Axis:
    """Maps values to the units between two ends of a picture."""

    def __init__(self, low: float, high: float, start: float, end: float, whole: bool = False) -> None:
        pad = 0.0 if whole else (high - low) * 0.06
        if low == high:  # a constant is drawn in the middle
            pad = 0.5 if whole else abs(low) * 0.1 or 1.0
        self._low = low - pad
        self._high = high + pad
        self._start = start
        self._end = end
        self._whole = whole

    def position(self, value: float) -> float:
        share = (value / 2 - self._low / 2) / (self._high / 2 - self._low / 2)  # halves do not overflow
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> tuple[Tick, ...]:
        numbers = nice_ticks(self._low, self._high, 7 if self._whole else 5, whole=self._whole)
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1.0
        return tuple(Tick(self.position(number), _tick_label(number, step)) for number in numbers)


def nice_ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Return at most ``most`` round numbers from ``low`` to ``high``, evenly spaced; whole ones if asked."""
    size = high / most - low / most
    if not (math.isfinite(size) and size > 0):
        return [low]
    power = 10.0 ** math.floor(math.log10(size))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= size)
    if whole:
        step = max(1.0, math.ceil(step))
    if low / step + 1 == low / step:  # numbers so close together that steps vanish in rounding
        return [low]
    first = math.ceil(low / step)
    return [tick for number in range(first, first + most + 1) if low <= (tick := number * step) <= high] or [low]


def _tick_label(number: float, step: float) -> str:
    if number != 0 and (abs(number) >= 1e5 or step < 1e-4):
        return f"{number:.3g}"
    decimals = len(f"{step:.10g}".partition(".")[2])
    return f"{number:.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def _curve(side: str, points: Points, x: _Axis, y: _Axis) -> Curve:
    segments: list[list[tuple[float, float]]] = [[]]
    for batch, value in points:
        if math.isfinite(value):
            segments[-1].append((x.position(batch), y.position(value)))
        else:
            segments.append([])
    lines = tuple(" ".join(f"{a},{b}" for a, b in segment) for segment in segments if segment)
    return Curve(side, lines, tuple(point for segment in segments for point in segment))


def _summary(one: Mapping[int, float], other: Mapping[int, float]) -> str:
    apart = {batch: distance(one[batch], other[batch]) for batch in sorted(one.keys() & other.keys())}
    worst = max(apart, key=lambda batch: apart[batch], default=None)
    if worst is None or apart[worst] == 0:
        return "No difference in any value."
    return f"At most {apart[worst]:.2g} apart, at batch {worst}."
