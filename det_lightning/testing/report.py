"""The page of ``pytest --trial-report``: checks, first difference and curves in a self-contained file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from det_lightning.files.local_files import write_output
from det_lightning.pages import make_curve, render_page
from det_lightning.testing.checks import CheckResult
from det_lightning.testing.records.difference import Difference, choose_tolerance
from det_lightning.testing.records.record import TrainingRecord, distance


def write_report(
    path: str | os.PathLike[str],
    trial: str,
    checks: Sequence[CheckResult],
    records: Mapping[str, TrainingRecord],
    difference: Difference | None = None,
    command: str = "",
) -> None:
    """Write the report, replacing an existing file.

    ``records`` are ``"reference"``, from the real determined, and ``"ours"``, as far as recorded, with their first
    ``difference``; ``command`` is the command line that made the report.
    """
    environments = {side: record.environment for side, record in records.items()}
    settings = next((record.settings for record in records.values()), None)
    page = render_page(
        "det_lightning.testing:report.html.jinja",
        "testing",
        {"number": lambda value: value if isinstance(value, str) else "\N{EM DASH}" if value is None else repr(value)},
        charts=list(_make_charts(records, difference)) or None,
        trial=trial,
        checks=checks,
        records=records,
        difference=difference,
        command=command,
        counts=Counter(check.outcome for check in checks),
        tolerance_for=choose_tolerance,
        names={side: f"{known['side']} {known[known['side']]}" for side, known in environments.items()},
        environments=environments,
        settings=settings,
        hparams={} if settings is None else settings.hparams,
    )
    write_output(path, page)


def _make_charts(records: Mapping[str, TrainingRecord], found: Difference | None) -> Iterator[dict[str, Any]]:
    for event, kind in (("batch_end", "metric"), ("validation", "validation metric")):
        by_side = {side: record.curves(event) for side, record in records.items()}
        for name in dict.fromkeys(name for metrics in by_side.values() for name in metrics):
            sides = {side: dict(metrics[name]) for side, metrics in by_side.items() if name in metrics}
            batches = sorted({batch for values in sides.values() for batch in values})
            # The first difference is marked in all training metrics, but in a validation metric only if it is there.
            is_marked = found is not None and (kind == "metric" or (found.kind, found.name) == (kind, name))
            yield {
                "title": name,
                "across": "batch" if kind == "metric" else "batches trained",
                "sides": {side: make_curve(values.items()) for side, values in sides.items()},
                "mark": found.batch if found is not None and is_marked and found.batch in batches else None,
                "summary": summarize_distance(*sides.values()) if len(sides) > 1 else "",
                "rows": [[batch, *(values.get(batch) for values in sides.values())] for batch in batches],
            }


def summarize_distance(one: Mapping[int, float], other: Mapping[int, float]) -> str:
    """Describe the largest distance between two curves, given as values by batch."""
    apart = {batch: distance(one[batch], other[batch]) for batch in sorted(one.keys() & other.keys())}
    worst = max(apart, key=apart.__getitem__, default=None)
    if worst is None or apart[worst] == 0:
        return "No difference in any value."
    return f"At most {apart[worst]:.2g} apart, at batch {worst}."
