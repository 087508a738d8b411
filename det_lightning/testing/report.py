"""The conversion report: one self-contained HTML page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_lightning.masking import mask
from det_lightning.pages import render_page
from det_lightning.testing.charts import Chart, make_chart
from det_lightning.testing.outcomes import BadTrial, CheckResult, NotChecked
from det_lightning.testing.records.difference import Difference, tolerance_for
from det_lightning.testing.records.record import TrainingRecord

if TYPE_CHECKING:
    from det_lightning.testing.training.runs import TrialRuns


def write_trial_report(path: Path, runs: TrialRuns, checks: Sequence[CheckResult], command: str) -> None:
    """Write the report of a trial, compared with its reference if there is one."""
    difference = None
    try:
        records = {"reference": runs.conversion.reference, "ours": runs.conversion.ours}
        difference = runs.conversion.difference
    except (BadTrial, NotChecked):
        records = {"ours": runs.own_record()}
    write_report(path, runs.source.name, checks, records, difference, command)


def write_report(
    path: str | os.PathLike[str],
    trial: str,
    checks: Sequence[CheckResult],
    records: Mapping[str, TrainingRecord],
    difference: Difference | None = None,
    command: str = "",
) -> None:
    """Write the report, replacing an existing file; raises OSError, or ImportError if jinja2 is not installed.

    ``records`` are the ``"reference"`` of the real determined and ``"ours"`` of det_lightning, as far as there are any,
    ``difference`` is the first one between the two, and ``command`` the command line that made the report.
    """
    environments = {side: record.environment for side, record in records.items()}
    settings = next((record.settings for record in records.values()), None)
    page = render_page(
        "det_lightning.testing:report.html.jinja",
        "testing",
        {"number": _shown},
        trial=trial,
        checks=checks,
        records=records,
        difference=difference,
        command=command,
        counts=Counter(check.outcome for check in checks),
        tolerance_for=tolerance_for,
        charts=list(_charts(records, difference)),
        names={side: f"{known['side']} {known[known['side']]}" for side, known in environments.items()},
        environments=environments,
        settings=settings,
        hparams={} if settings is None else mask(settings.hparams),
    )
    Path(path).write_text(page, encoding="utf-8")


def _shown(value: Any) -> str:
    if value is None:
        return "\N{EM DASH}"
    return value if isinstance(value, str) else repr(value)


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
