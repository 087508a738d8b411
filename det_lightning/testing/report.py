"""The conversion report: one self-contained HTML page."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_lightning.masking import mask
from det_lightning.testing.charts import Chart, make_chart
from det_lightning.testing.outcomes import BadTrial, NotChecked
from det_lightning.testing.records.comparison import tolerance_for
from det_lightning.testing.records.difference import Difference
from det_lightning.testing.records.record import TrainingRecord

if TYPE_CHECKING:
    from det_lightning.testing.training.runs import TrialRuns

_OUTCOMES = {"passed": "passed", "failed": "failed", "error": "error", "skipped": "not checked"}
_ENVIRONMENT = ("Python", "torch", "numpy", "Device", "Processor", "Threads", "Platform")


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """One line of the checklist.

    Raises:
        ValueError: ``outcome`` is another one.
    """

    name: str  # what was checked, such as "is deterministic under a seed"
    outcome: str  # "passed", "failed", "error" or "skipped"
    duration_s: float = 0.0  # how long it took, in seconds
    message: str = ""  # why it failed or was skipped; may have several lines

    def __post_init__(self) -> None:
        if self.outcome not in _OUTCOMES:
            raise ValueError(f"The outcome of a check is one of {', '.join(_OUTCOMES)}; got {self.outcome!r}.")


@dataclasses.dataclass(frozen=True)
class ReportData:
    """All that a report shows."""

    trial: str  # the trial, as "module:Class"
    checks: Sequence[CheckResult]  # the checklist, in order
    reference: TrainingRecord | None = None  # the record of the real determined, if there is one
    ours: TrainingRecord | None = None  # the record of det_lightning, if there is one
    difference: Difference | None = None  # the first difference of the two, if any
    command: str = ""  # the command line that made it, shown for who wants to make it again

    @property
    def records(self) -> dict[str, TrainingRecord]:
        """The records that there are, by side."""
        sides = {"reference": self.reference, "ours": self.ours}
        return {side: record for side, record in sides.items() if record is not None}

    @property
    def bit_equal(self) -> bool:
        """Whether the two sides are equal to the bit."""
        if self.reference is None or self.ours is None or self.difference is not None:
            return False
        return tolerance_for(self.reference, self.ours).exact


def write_trial_report(path: Path, runs: TrialRuns, checks: Sequence[CheckResult], command: str) -> None:
    """Write the report of a trial, beside its reference if there is one."""
    try:
        conversion = runs.conversion
    except (BadTrial, NotChecked):
        data = ReportData(runs.source.name, checks, ours=runs.own_record(), command=command)
    else:
        records = (conversion.reference, conversion.ours, conversion.difference)
        data = ReportData(runs.source.name, checks, *records, command)
    write_report(path, data)


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
    source = resources.files("det_lightning.testing").joinpath("report.html.jinja").read_text(encoding="utf-8")
    page = environment.from_string(source).render(
        data=data,
        counts=Counter(check.outcome for check in data.checks),
        outcomes=_OUTCOMES,
        verdict=_verdict(data.checks),
        duration_s=sum(check.duration_s for check in data.checks),
        charts=_charts(data),
        names={side: _name_of(record) for side, record in data.records.items()},
        environment=_environment_rows(list(data.records.values())),
        settings=next(
            (
                dataclasses.replace(record.settings, hparams=mask(record.settings.hparams))
                for record in data.records.values()
            ),
            None,
        ),
        made_at=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )
    Path(path).write_text(page, encoding="utf-8")


def _verdict(checks: Sequence[CheckResult]) -> tuple[str, str]:
    """Return the outcome of all checks together, and a sentence on it."""
    counts = Counter(check.outcome for check in checks)
    failed = counts["failed"] + counts["error"]
    if failed:
        return "failed", f"{failed} of {len(checks)} checks failed"
    if not counts["passed"]:
        return "skipped", "Nothing was checked"
    passed = f"{counts['passed']} check{'' if counts['passed'] == 1 else 's'} passed"
    if counts["skipped"]:
        return "passed", f"{passed}, {counts['skipped']} not checked"
    return "passed", f"All {passed}" if len(checks) > 1 else passed


def _name_of(record: TrainingRecord) -> str:
    side = str(record.environment.get("side", ""))
    return f"{side} {record.environment.get(side, '')}".strip()


def _environment_rows(records: list[TrainingRecord]) -> list[tuple[str, list[str], bool]]:
    """Return the rows of the environment: what, the values of all sides, and whether they differ."""
    rows = []
    for title in _ENVIRONMENT:
        values = [str(record.environment.get(title.lower(), "unknown")) for record in records]
        rows.append((title, values, len(set(values)) > 1))
    return rows


def _charts(data: ReportData) -> list[Chart]:
    training = {side: record.training_metrics() for side, record in data.records.items()}
    validation = {side: record.validation_metrics() for side, record in data.records.items()}
    found = data.difference
    charts = []
    for kind, across, sides in (("metric", "batch", training), ("validation metric", "batches trained", validation)):
        for name in dict.fromkeys(name for metrics in sides.values() for name in metrics):
            points = {side: metrics.get(name, []) for side, metrics in sides.items()}
            # A chart of training shows where anything differs first, one of validations only what differs in it.
            marked = found is not None and (kind == "metric" or (found.kind, found.name) == (kind, name))
            charts.append(make_chart(name, across, points, found.batch if found is not None and marked else None))
    return charts


def _shown_value(value: Any) -> str:
    if value is None:
        return "\N{EM DASH}"
    return value if isinstance(value, str) else repr(value)
