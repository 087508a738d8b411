"""The conversion report: one self-contained HTML page."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from det_lightning.masking import mask
from det_lightning.pages import render_page
from det_lightning.testing.checks import CheckResult
from det_lightning.testing.records.difference import Difference, choose_tolerance
from det_lightning.testing.records.record import TrainingRecord, distance

Points = Sequence[tuple[int, float]]


def write_report(
    path: str | os.PathLike[str],
    trial: str,
    checks: Sequence[CheckResult],
    records: Mapping[str, TrainingRecord],
    difference: Difference | None = None,
    command: str = "",
) -> None:
    """Write the report, replacing an existing file; raises OSError, or ImportError if jinja2 is not installed.

    ``records`` are the ``"reference"`` of the real determined and ``"ours"`` of det_lightning, if any, ``difference``
    is the first difference between both, and ``command`` the command line for the report.
    """
    environments = {side: record.environment for side, record in records.items()}
    settings = next((record.settings for record in records.values()), None)
    page = render_page(
        "det_lightning.testing:report.html.jinja",
        "testing",
        {"number": lambda value: value if isinstance(value, str) else "\N{EM DASH}" if value is None else repr(value)},
        trial=trial,
        checks=checks,
        records=records,
        difference=difference,
        command=command,
        counts=Counter(check.outcome for check in checks),
        tolerance_for=choose_tolerance,
        charts=list(_charts(records, difference)),
        sizes=SIZES,
        names={side: f"{known['side']} {known[known['side']]}" for side, known in environments.items()},
        environments=environments,
        settings=settings,
        hparams={} if settings is None else mask(settings.hparams),
    )
    Path(path).write_text(page, encoding="utf-8")


def _charts(records: Mapping[str, TrainingRecord], found: Difference | None) -> Iterator[Chart]:
    for event, kind in (("batch_end", "metric"), ("validation", "validation metric")):
        sides = {side: record.curves(event) for side, record in records.items()}
        for name in dict.fromkeys(name for metrics in sides.values() for name in metrics):
            points = {side: metrics.get(name, []) for side, metrics in sides.items()}
            # The first difference overall is marked in every training metric, and in a validation metric only if it
            # concerns that metric.
            marked = found is not None and (kind == "metric" or (found.kind, found.name) == (kind, name))
            across = "batch" if kind == "metric" else "batches trained"
            yield make_chart(name, across, points, found.batch if found is not None and marked else None)


@dataclasses.dataclass(frozen=True)
class Chart:
    """A metric over batches, on one side or both; positions are in the picture's units."""

    title: str  # the metric's name
    across: str  # the title of the horizontal axis
    #: By side, "reference" or "ours": the segments of its curve; numbers that are not finite leave gaps between them.
    curves: dict[str, list[list[tuple[float, float]]]]
    x_ticks: list[tuple[float, str]]  # position and label
    y_ticks: list[tuple[float, str]]
    mark: float | None  # the position of the first difference, if it is in this metric
    summary: str  # one sentence on the distance between the curves
    rows: list[tuple[int, list[float | None]]]  # batch, and the values of all curves


# The sizes of a picture and of its margins.
SIZES = {"width": 560, "height": 256, "left": 62, "right": 14, "top": 14, "bottom": 46}


def make_chart(title: str, across: str, sides: Mapping[str, Points], marked_batch: int | None = None) -> Chart:
    """Return the chart of a metric, from its batches and values on each side."""
    drawn = {side: dict(points) for side, points in sides.items() if points}
    tables = list(drawn.values())
    batches = sorted({batch for table in tables for batch in table})
    values = [value for table in tables for value in table.values() if math.isfinite(value)]
    x = _Axis(batches[0], batches[-1], SIZES["left"], SIZES["width"] - SIZES["right"], whole=True)
    y = _Axis(min(values, default=0.0), max(values, default=1.0), SIZES["height"] - SIZES["bottom"], SIZES["top"])
    return Chart(
        title=title,
        across=across,
        curves={side: _segments(sides[side], x, y) for side in drawn},
        x_ticks=x.ticks(),
        y_ticks=y.ticks(),
        mark=None if marked_batch is None or marked_batch not in batches else x.position(marked_batch),
        summary=_summary(*tables) if len(tables) > 1 else "",
        rows=[(batch, [table.get(batch) for table in tables]) for batch in batches],
    )


class _Axis:
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

    def ticks(self) -> list[tuple[float, str]]:
        numbers = nice_ticks(self._low, self._high, 7 if self._whole else 5, whole=self._whole)
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1.0
        return [(self.position(number), _tick_label(number, step)) for number in numbers]


def nice_ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Return at most ``most`` round numbers from ``low`` to ``high``, evenly spaced; integers if ``whole``."""
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


def _segments(points: Points, x: _Axis, y: _Axis) -> list[list[tuple[float, float]]]:
    runs = itertools.groupby(points, lambda point: math.isfinite(point[1]))
    return [[(x.position(batch), y.position(value)) for batch, value in run] for finite, run in runs if finite]


def _summary(one: Mapping[int, float], other: Mapping[int, float]) -> str:
    apart = {batch: distance(one[batch], other[batch]) for batch in sorted(one.keys() & other.keys())}
    worst = max(apart, key=apart.__getitem__, default=None)
    if worst is None or apart[worst] == 0:
        return "No difference in any value."
    return f"At most {apart[worst]:.2g} apart, at batch {worst}."
