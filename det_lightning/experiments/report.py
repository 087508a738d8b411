"""The page of an experiment, or of several: curves, metrics over hyperparameters, and a table of trials.

Change here: ``report.html.jinja`` beside this file draws the charts; ``trial_reports.py`` reads the curves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from det_lightning.experiments.trial_table import divide_hparams, format_cell, make_columns, split_metric
from det_lightning.files.local_files import write_output
from det_lightning.hyperparameters import flatten
from det_lightning.pages import make_curve, render_page


def write_report(details: dict[str, Any], file: Path, *, compared: bool = False) -> None:
    """Write the page of an experiment; ``details`` include the curves of the trials.

    Raises:
        ImportError: plotly or jinja2 is not installed.
    """
    searched, is_larger_better = split_metric(details)
    varying, constants = divide_hparams(details["trials"])
    trials = [
        {
            "name": f"Trial {trial['id']}" if isinstance(trial["id"], int) else trial["id"],
            "hparams": flatten(trial["hparams"] or {}),
            "curves": {name: make_curve(points) for name, points in trial["curves"].items()},
            "values": _find_values(trial["curves"], trial["best_batches"]),
        }
        for trial in details["trials"]
    ]
    reported = sorted({name for trial in trials for name in trial["curves"]}, key=lambda name: (name != searched, name))
    numbers_first = sorted(varying, key=lambda column: not column.is_number)
    charts = {
        "trials": trials,
        "metrics": reported,
        "varying": [column.heading for column in numbers_first],
        "searched": searched,
        "isLargerBetter": is_larger_better,
        "logarithmic": details["logarithmic"],
    }
    known = ("state", "metric", "best", "best_trial", "started")
    page = render_page(
        "det_lightning.experiments:report.html.jinja",
        "report",
        {"cell": format_cell},
        charts=charts if reported else None,
        title=details["name"],
        details=details,
        summary=[
            (name.replace("_", " "), format_cell(details[name]), False)
            for name in known
            if details.get(name) is not None
        ],
        columns=make_columns(details, compared=compared),
        constants=constants,
    )
    write_output(file, page)


def _find_values(curves: dict[str, list[tuple[float, float]]], best_batches: int | None) -> dict[str, float]:
    """Return each metric's value at, or last before, the best validation; without a validation, the last value."""
    values = {}
    for name, points in curves.items():
        for batch, value in sorted(points, key=lambda point: point[0]):
            if best_batches is None or batch <= best_batches:
                values[name] = value
    return values
