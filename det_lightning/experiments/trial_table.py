"""The table of trials in ``experiment show``, ``experiment compare`` and the page: order, columns and numbers.

Change here: a new column; the commands in ``det_lightning/cli/experiment_reading.py`` only print the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from det_lightning.files.strict_json import to_json
from det_lightning.hyperparameters import flatten


class Column(NamedTuple):
    """A column of a table, with a cell for each trial; None is an empty cell."""

    heading: str
    cells: list[Any]
    is_number: bool = True


def split_metric(details: dict[str, Any]) -> tuple[str, bool]:
    """Return the metric of the search, and whether larger values are better."""
    name, _, order = (details["metric"] or "").rpartition(" (")
    return name, order.startswith("larger")


def has_other_checkpoint(trial: dict[str, Any]) -> bool:
    """Return whether a trial's checkpoint was written at another batch than its best validation."""
    return trial["best_batches"] is not None and trial["checkpoint_batches"] not in (None, trial["best_batches"])


def make_columns(details: dict[str, Any], *, compared: bool = False) -> list[Column]:
    """Return the columns of an experiment's trials, or of compared ones, without empty columns."""
    trials = details["trials"]
    ids = [f"* {trial['id']}" if trial["id"] == details["best_trial"] else str(trial["id"]) for trial in trials]
    columns = [Column("ID", ids), Column("STATE", [trial["state"] for trial in trials], is_number=False)]
    columns += [Column(name.upper(), [trial[name] for trial in trials]) for name in ("batches", "best", "latest")]
    if compared:
        columns += [Column(name.upper(), [trial[name] for trial in trials]) for name in ("trials", "seed")]
    if compared and details["metric"] is None:  # otherwise all have the same
        columns.append(Column("METRIC", [trial["metric"] for trial in trials], is_number=False))
    columns.append(Column("RESTARTS", [trial["restarts"] or None for trial in trials]))
    columns.append(Column("NODES", [", ".join(trial["nodes"]) for trial in trials], is_number=False))
    columns += divide_hparams(trials)[0]
    if not compared:
        columns.append(Column("CHECKPOINT", [_describe_checkpoint(trial) for trial in trials], is_number=False))
    return [column for column in columns if any(cell not in (None, "") for cell in column.cells)]


def divide_hparams(trials: list[dict[str, Any]]) -> tuple[list[Column], str]:
    """Return a column for each hyperparameter with different values in the trials, and a line with the others."""
    columns = []
    constants = []
    hparams = [flatten(trial["hparams"] or {}) for trial in trials]
    for name in sorted({name for values in hparams for name in values}):
        cells = [_NULL if values.get(name, _NULL) is None else values.get(name) for values in hparams]
        if len({repr(values[name]) if name in values else None for values in hparams}) == 1:
            constants.append(f"{name}={format_cell(cells[0])}")
        else:
            is_number = all(isinstance(values.get(name), int | float | None) for values in hparams)
            columns.append(Column(name, cells, is_number))
    return columns, ", ".join(constants)


# A hyperparameter given as None; an empty cell stands for a missing hyperparameter.
_NULL = "null"


def _describe_checkpoint(trial: dict[str, Any]) -> str | None:
    checkpoint: str | None = trial["checkpoint"]
    if checkpoint is None:
        return None
    notes = ["missing"] if trial["checkpoint_exists"] is False else []
    if has_other_checkpoint(trial):
        notes += [f"batch {trial['checkpoint_batches']}", f"best: batch {trial['best_batches']}"]
    return f"{checkpoint} ({'; '.join(notes)})" if notes else checkpoint


def format_cell(value: Any) -> str:
    """Return a cell's value as text for people: numbers with four digits, nothing for None, JSON for lists."""
    if value is None or isinstance(value, float):
        return format_number(value)
    return value if isinstance(value, str) else to_json(value)


def format_number(value: float | None) -> str:
    """Return a number with four significant digits, but all digits before the point; empty for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def compare_experiments(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Describe several experiments as one: the best trial of each, or its first if the experiment has no metric.

    Duplicates are ignored. ``best_trial`` is the best of all trials if the experiments have the same metric. Raise a
    ``ValueError`` if an experiment has no trial.
    """
    found = list({details["directory"]: details for details in found}.values())
    names = [Path(details["directory"]).name for details in found]
    if len(set(names)) < len(names):
        names = [details["directory"] for details in found]
    trials = [_choose_trial(details, name) for details, name in zip(found, names, strict=True)]
    metrics = {details["metric"] for details in found}
    _, is_larger_better = split_metric(found[0])
    ranked = [trial for trial in trials if trial["best"] is not None] if len(metrics) == 1 else []
    choose = max if is_larger_better else min
    best = choose(ranked, key=lambda trial: trial["best"], default=None)
    return {
        "name": f"Comparison of {len(found)} experiments",
        "metric": found[0]["metric"] if len(metrics) == 1 else None,
        "best": None if best is None else best["best"],
        "best_trial": None if best is None else best["id"],
        "messages": [],
        "logarithmic": sorted({name for details in found for name in details["logarithmic"]}),
        "trials": trials,
    }


def _choose_trial(details: dict[str, Any], name: str) -> dict[str, Any]:
    trials = details["trials"]
    if not trials:
        raise ValueError(f"The experiment in {details['directory']} has no trials yet.")
    trial = trials[0]  # the best
    label = f"{name}, trial {trial['id']}" if len(trials) > 1 else name
    metric, _ = split_metric(details)
    return {**trial, "id": label, "trials": len(trials), "metric": metric}
