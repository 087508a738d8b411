"""The conversion report: one self-contained HTML page."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from det_lightning.extras import how_to_install
from det_lightning.masking import mask
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
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(f"The report needs jinja2: {how_to_install('testing')}.") from error
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["number"] = lambda value: (
        "\N{EM DASH}" if value is None else value if isinstance(value, str) else repr(value)
    )
    source = resources.files("det_lightning.testing").joinpath("report.html.jinja").read_text(encoding="utf-8")
    environments = {side: record.environment for side, record in records.items()}
    settings = next((record.settings for record in records.values()), None)
    page = environment.from_string(source).render(
        style=resources.files("det_lightning").joinpath("report.css").read_text(encoding="utf-8").rstrip(),
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
        made_at=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )
    Path(path).write_text(page, encoding="utf-8")


def _charts(records: Mapping[str, TrainingRecord], found: Difference | None) -> Iterator[Chart]:
    for event, kind, across in [
        ("batch_end", "metric", "batch"),
        ("validation", "validation metric", "batches trained"),
    ]:
        sides = {side: record.curves(event) for side, record in records.items()}
        for name in dict.fromkeys(name for metrics in sides.values() for name in metrics):
            points = {side: metrics.get(name, []) for side, metrics in sides.items()}
            # The first difference overall is marked in every training metric, and in a validation metric only if it
            # concerns that metric.
            marked = found is not None and (kind == "metric" or (found.kind, found.name) == (kind, name))
            yield make_chart(name, across, points, found.batch if found is not None and marked else None)
