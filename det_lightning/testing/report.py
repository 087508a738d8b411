"""The conversion report: one self-contained HTML page."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from det_lightning.testing.charts import Chart, make_chart
from det_lightning.testing.records.difference import Difference
from det_lightning.testing.records.record import TrainingRecord

__all__ = ["CheckResult", "ReportData", "write_report"]

_TEMPLATE = "report.html.jinja"
_OUTCOMES = {"passed": "passed", "failed": "failed", "error": "error", "skipped": "not checked"}
_ENVIRONMENT = {
    "python": "Python",
    "torch": "torch",
    "numpy": "numpy",
    "device": "Device",
    "processor": "Processor",
    "threads": "Threads",
    "platform": "Platform",
}


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """One line of the checklist.

    Attributes:
        name: what was checked, such as ``"is deterministic under a seed"``.
        outcome: ``"passed"``, ``"failed"``, ``"error"`` or ``"skipped"``.
        duration_s: how long it took, in seconds.
        message: why it failed or was skipped; may have several lines.

    Raises:
        ValueError: ``outcome`` is another one.
    """

    name: str
    outcome: str
    duration_s: float = 0.0
    message: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in _OUTCOMES:
            raise ValueError(f"The outcome of a check is one of {', '.join(_OUTCOMES)}; got {self.outcome!r}.")


@dataclasses.dataclass(frozen=True)
class ReportData:
    """All that a report shows.

    Attributes:
        trial: the trial, as ``"module:Class"``.
        checks: the checklist, in order.
        reference: the record of the real determined, if there is one.
        ours: the record of det_lightning, if there is one.
        difference: the first difference of the two, if any.
        command: the command line that made it, shown for who wants to make it again.
    """

    trial: str
    checks: Sequence[CheckResult]
    reference: TrainingRecord | None = None
    ours: TrainingRecord | None = None
    difference: Difference | None = None
    command: str = ""


def write_report(path: str | os.PathLike[str], data: ReportData) -> None:
    """Write the report to ``path``, replacing what is there. Needs jinja2 (``pip install 'det-lightning[testing]'``).

    Raises:
        ImportError: jinja2 is not installed.
        OSError: the file cannot be written.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("The report needs jinja2: pip install 'det-lightning[testing]'.") from error
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["number"] = _shown_value
    template = environment.from_string(
        resources.files("det_lightning.testing").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    )
    Path(path).write_text(template.render(**_context(data)), encoding="utf-8")


def _context(data: ReportData) -> dict[str, Any]:
    records = {"reference": data.reference, "ours": data.ours}
    sides = {side: record for side, record in records.items() if record is not None}
    settings = next((record.settings for record in sides.values()), None)
    return {
        "data": data,
        "counts": Counter(check.outcome for check in data.checks),
        "outcomes": _OUTCOMES,
        "verdict": _verdict(data),
        "duration_s": sum(check.duration_s for check in data.checks),
        "charts": _charts(sides, data.difference),
        "Chart": Chart,
        "names": {side: _name_of(record) for side, record in sides.items()},
        "environment": _environment_rows(sides),
        "settings": settings,
        "made_at": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "bit_equal": _same_to_the_bit(data),
    }


def _verdict(data: ReportData) -> tuple[str, str]:
    """Return the outcome of all checks together, and a sentence on it."""
    counts = Counter(check.outcome for check in data.checks)
    total = len(data.checks)
    broken = counts["failed"] + counts["error"]
    if broken:
        return "failed", f"{broken} of {total} checks failed"
    if not counts["passed"]:
        return "skipped", "Nothing was checked"
    if counts["skipped"]:
        return "passed", f"{_passed(counts['passed'])}, {counts['skipped']} not checked"
    return "passed", f"All {_passed(total)}" if total > 1 else _passed(total)


def _passed(count: int) -> str:
    return f"{count} check{' passed' if count == 1 else 's passed'}"


def _same_to_the_bit(data: ReportData) -> bool:
    from det_lightning.testing.records.comparison import tolerance_for

    if data.reference is None or data.ours is None or data.difference is not None:
        return False
    return tolerance_for(data.reference, data.ours).exact


def _name_of(record: TrainingRecord) -> str:
    side = str(record.environment.get("side", ""))
    return f"{side} {record.environment.get(side, '')}".strip()


def _environment_rows(sides: Mapping[str, TrainingRecord]) -> list[tuple[str, list[str], bool]]:
    """Return the rows of the environment: what, the values of all sides, and whether they differ."""
    rows = []
    for key, title in _ENVIRONMENT.items():
        values = [str(record.environment.get(key, "unknown")) for record in sides.values()]
        rows.append((title, values, len(set(values)) > 1))
    return rows


def _charts(sides: Mapping[str, TrainingRecord], difference: Difference | None) -> list[Chart]:
    kinds = (
        ("metric", "batch", TrainingRecord.training_metrics),
        ("validation metric", "batches trained", TrainingRecord.validation_metrics),
    )
    charts = []
    for kind, across, curves_of in kinds:
        curves = {side: curves_of(record) for side, record in sides.items()}
        for name in dict.fromkeys(name for metrics in curves.values() for name in metrics):
            points = {side: metrics.get(name, []) for side, metrics in curves.items()}
            charts.append(make_chart(name, across, points, _marked_batch(difference, kind, name)))
    return charts


def _marked_batch(difference: Difference | None, kind: str, name: str) -> int | None:
    """Return where to mark the first difference in a chart: if it is of this metric, or, in training, of anything."""
    if difference is None or (kind == "validation metric" and (difference.kind, difference.name) != (kind, name)):
        return None
    return difference.batch


def _shown_value(value: Any) -> str:
    if value is None:
        return "\N{EM DASH}"
    return value if isinstance(value, str) else repr(value)
