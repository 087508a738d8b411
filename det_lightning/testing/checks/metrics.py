"""Are the metrics that training and validation report usable?"""

from __future__ import annotations

import datetime
import enum
import numbers
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from det_lightning.testing.checks import CheckFailed, NotChecked
from det_lightning.testing.training.runs import TrialRuns

_JSON = (str, bool, bytes, datetime.datetime, enum.Enum, uuid.UUID, type(None))


def validates(runs: TrialRuns) -> None:
    """The trial validates, and its metrics are JSON-serializable and have the same names each time."""
    run = runs.straight
    batches = [(f"batch {index}", metrics) for index, metrics in enumerate(run.observer.metrics)]
    validations = [(f"the validation after {after} batches", metrics) for after, metrics in run.observer.validations]
    _require_stable_names(batches, "train_batch()")
    _require_stable_names(validations, "the validation")
    if run.fails_in_validation:
        runs.succeeded(run)
    runs.require(run)
    if not validations:
        raise NotChecked(f"the trial stopped after {run.record.batches} batches, without a validation")
    for when, metrics in validations:
        if wrong := [
            f"{name!r}{path}: {type(value).__name__} {value!r:.60}"
            for name, metric in metrics.items()
            for path, value in _not_json(metric)
        ]:
            cause = "an object instead of its number: return float(...), or value.item() of a tensor"
            raise CheckFailed(f"Validation metrics of {when} cannot be written as JSON:", cause, details=wrong)
    searcher_metric = runs.options.configured("searcher").get("metric")
    if searcher_metric not in (None, *validations[0][1]):
        raise CheckFailed(
            f"searcher.metric of the configuration is {searcher_metric!r}, but the validation returns "
            f"{', '.join(validations[0][1])}.",
            "a metric that was renamed only in the trial, or only in the configuration",
        )


def _require_stable_names(reports: Sequence[tuple[str, dict[str, Any]]], source: str) -> None:
    named = [(when, set(metrics)) for when, metrics in reports if metrics]
    for when, names in named:
        first, expected = named[0]
        if names != expected:
            changes = [f"without {name!r}" for name in sorted(expected - names)]
            changes += [f"with {name!r} added" for name in sorted(names - expected)]
            raise CheckFailed(
                f"The metrics of {source} change their names: at {when} they are those of {first} "
                f"{' and '.join(changes)}.",
                "a metric that is returned only now and then; return NaN or the latest value in between",
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
