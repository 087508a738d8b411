"""The table of trials that ``det-lightning experiment show`` prints: the best marked, hyperparameters in columns."""

from __future__ import annotations

import math
from typing import Any

from det_lightning.cli.output import print_lines, print_table
from det_lightning.files.strict_json import as_number, to_json
from det_lightning.hyperparameters import flatten


def sort_trials(details: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    """Return the trials by a metric of their best validations; those without it come last.

    The best is first for the metric of the search, otherwise the smallest, or the largest for ``-METRIC``. Raise a
    ``ValueError`` if no trial has the metric.
    """
    trials: list[dict[str, Any]] = details["trials"]
    name = metric.removeprefix("-")
    known = {name: None for trial in trials for name, value in trial["metrics"].items() if as_number(value) is not None}
    if name not in known:
        raise ValueError(f"No trial has reported a number {name!r}; the metrics are: {', '.join(known) or 'none'}.")
    searched, is_larger_better = _searched(details)
    largest_first = (name == searched and is_larger_better) != metric.startswith("-")
    values = [_metric(trial, name) for trial in trials]
    with_metric = [(value, index) for index, value in enumerate(values) if value is not None]
    ranked = sorted(with_metric, key=lambda pair: pair[0], reverse=largest_first)
    return [trials[index] for _, index in ranked] + [trials[i] for i, value in enumerate(values) if value is None]


def _searched(details: dict[str, Any]) -> tuple[str, bool]:
    """Return the metric of the search, and whether larger values are better."""
    name, _, order = (details["metric"] or "").rpartition(" (")
    return name, order.startswith("larger")


def _metric(trial: dict[str, Any], name: str) -> float | None:
    value = as_number(trial["metrics"].get(name))
    return None if value is None or math.isnan(value) else value


def is_of_other_validation(trial: dict[str, Any]) -> bool:
    """Return whether a trial's checkpoint was written at another batch than its best validation."""
    return trial["best_batches"] is not None and trial["checkpoint_batches"] not in (None, trial["best_batches"])


def print_details(details: dict[str, Any], sorted_by: str | None = None) -> None:
    """Print what is known about an experiment, and its trials as a table without empty columns."""
    from det_lightning.experiments.overview import format_number

    trials = details["trials"]
    varying, constants = _divide_hparams([flatten(trial["hparams"] or {}) for trial in trials])
    known = {**details, "best": format_number(details["best"])}
    if details["best_trial"] is not None:
        known["best"] += f", of trial {details['best_trial']} (*)"
    known["hyperparameters of all trials" if len(trials) > 1 else "hyperparameters"] = constants
    left_out = ("trials", "best_trial", "messages")
    print_lines(f"{name}: {value}" for name, value in known.items() if name not in left_out and value not in (None, ""))
    print_lines(f"message: {message}" for message in details["messages"])
    columns = [
        (">ID", [f"* {trial['id']}" if trial["id"] == details["best_trial"] else str(trial["id"]) for trial in trials]),
        ("STATE", [trial["state"] or "" for trial in trials]),
        (">BATCHES", [_describe(trial["batches"]) for trial in trials]),
        (">BEST", [_describe(trial["best"]) for trial in trials]),
        (">LATEST", [_describe(trial["latest"]) for trial in trials]),
        *_sorted_column(details, (sorted_by or "").removeprefix("-")),
        (">RESTARTS", [_describe(trial["restarts"] or None) for trial in trials]),
        *varying,
        ("CHECKPOINT", [_describe_checkpoint(trial) for trial in trials]),
    ]
    filled = [column for column in columns if any(column[1])]
    if filled:
        print_table([heading for heading, _ in filled], map(list, zip(*(cells for _, cells in filled), strict=True)))


def _divide_hparams(hparams: list[dict[str, Any]]) -> tuple[list[tuple[str, list[str]]], str]:
    """Return a column for each hyperparameter that differs between trials, and a line with the others."""
    columns = []
    constants = []
    for name in sorted({name for one in hparams for name in one}):
        cells = [_describe(one[name], null="null") if name in one else "" for one in hparams]
        if len({repr(one[name]) if name in one else None for one in hparams}) == 1:
            constants.append(f"{name}={cells[0]}")
        else:
            is_number = all(isinstance(one.get(name), int | float | None) for one in hparams)
            columns.append((f"{'>' if is_number else ''}{name}", cells))
    return columns, ", ".join(constants)


def _sorted_column(details: dict[str, Any], name: str) -> list[tuple[str, list[str]]]:
    """Return the column of the metric that the trials are sorted by, unless the search has the same metric."""
    if not name or name == _searched(details)[0]:
        return []
    return [(f">{name}", [_describe(_metric(trial, name)) for trial in details["trials"]])]


def _describe_checkpoint(trial: dict[str, Any]) -> str:
    if trial["checkpoint"] is None or not is_of_other_validation(trial):
        return trial["checkpoint"] or ""
    return f"{trial['checkpoint']} (batch {trial['checkpoint_batches']}; best: batch {trial['best_batches']})"


def _describe(value: Any, null: str = "") -> str:
    from det_lightning.experiments.overview import format_number

    if value is None:
        return null
    if isinstance(value, float):
        return format_number(value)
    return value if isinstance(value, str) else to_json(value)
