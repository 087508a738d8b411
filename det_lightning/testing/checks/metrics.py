"""What training and validation report."""

from __future__ import annotations

import datetime
import enum
import numbers
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np

from det_lightning.testing.observation.observer import Happening
from det_lightning.testing.outcomes import CheckFailed, NotChecked
from det_lightning.testing.training.runs import TrialRuns

__all__ = ["validates"]

_JSON = (str, bool, bytes, datetime.datetime, enum.Enum, uuid.UUID, type(None))


def validates(runs: TrialRuns) -> None:
    """The trial validates; its metrics can be written as JSON, and have the same names each time."""
    run = runs.straight
    _require_stable_names(run.observer.happenings, "metric", "train_batch()")
    validations = [happening for happening in run.observer.happenings if happening.what == "validation"]
    _require_stable_names(validations, "validation metric", "the validation")
    if run.failure is not None and run.failure.stage.startswith("in the validation"):
        raise runs.explained(run)
    runs.require(run)
    if not validations:
        raise NotChecked(f"the trial ended its run after {run.observer.batches} batches, without a validation")
    for happening in validations:
        _require_json(happening)
    _require_searcher_metric(runs, validations[0])


def _require_stable_names(happenings: list[Happening], kind: str, source: str) -> None:
    first: tuple[set[str], str] | None = None
    for happening in happenings:
        names = {name for of_kind, name in happening.values if of_kind == kind}
        if not names:
            continue
        if first is None:
            first = names, happening.place
        elif names != first[0]:
            gone, new = sorted(first[0] - names), sorted(names - first[0])
            changes = [f"without {', '.join(map(repr, gone))}"] * bool(gone) + [
                f"with {', '.join(map(repr, new))} added"
            ] * bool(new)
            raise CheckFailed(
                f"The metrics of {source} change their names: at {happening.place} they are those of {first[1]} "
                f"{' and '.join(changes)}.",
                causes=["a metric that is only returned now and then; return NaN or the latest value in between"],
            )


def _require_json(happening: Happening) -> None:
    wrong = [
        f"{name!r}{path}: {type(value).__name__} {value!r:.60}"
        for (kind, name), metric in happening.values.items()
        if kind == "validation metric"
        for path, value in _not_json(metric)
    ]
    if wrong:
        raise CheckFailed(
            f"Validation metrics of {happening.place} can not be written as JSON:",
            wrong,
            ["an object in place of its number: return float(...), or value.item() of a tensor"],
        )


def _not_json(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "fiubUS":
            yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str | int | float | bool | type(None)):
                yield from _not_json(item, f"{path}[{key!r}]")
            else:
                yield f"{path}, key", key
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _not_json(item, f"{path}[{index}]")
    elif not isinstance(value, _JSON) and not isinstance(value, numbers.Real) and not hasattr(value, "__json__"):
        yield path, value


def _require_searcher_metric(runs: TrialRuns, validation: Happening) -> None:
    metric = ((runs.setup.config or {}).get("searcher") or {}).get("metric")
    names = [name for kind, name in validation.values if kind == "validation metric"]
    if metric is not None and metric not in names:
        raise CheckFailed(
            f"searcher.metric of the configuration is {metric!r}, and the validation returns {', '.join(names)}.",
            causes=["a metric that was renamed in the trial or in the configuration only"],
        )
