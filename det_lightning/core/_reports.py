"""Decides which reports a script may make, as Determined's master does: steps, epochs, one value each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from det_lightning.core._task import TrialTask
from det_lightning.files.plain_values import as_plain
from det_lightning.files.strict_json import spell_numbers
from det_lightning.masking import short_text

# The kinds of dtype below np.number: int, unsigned int, float, complex, and timedelta, which counts as an integer.
_NUMBER_KINDS = "iufcm"
_REAL_KINDS = "iuf"


def select_scalars(metrics: dict[str, Any], leave_out: Iterable[str] = ()) -> dict[str, float]:
    """Return all real scalar metrics, for loggers, as floats; names become strings."""
    numbers = ((name, as_float(value)) for name, value in metrics.items() if name not in leave_out)
    return {str(name): number for name, number in numbers if number is not None}


def as_float(value: Any) -> float | None:
    """Return a number, or an array of shape ``()`` with a number, as a float; None for any other value.

    Complex numbers, durations and integers too large for a float give None.
    """
    if type(value) is np.ndarray and value.ndim == 0 and value.dtype.kind in _REAL_KINDS:
        return float(value)  # the case of nearly all metrics
    if not is_numerical_scalar(value) or np.iscomplexobj(value):
        return None
    try:
        return float(value)
    except (TypeError, OverflowError):
        return None


def is_numerical_scalar(value: Any) -> bool:
    """Return whether ``value`` is a number, or a numpy array of shape ``()`` with a number."""
    if type(value) is np.ndarray or isinstance(value, np.ndarray):
        return value.ndim == 0 and value.dtype.kind in _NUMBER_KINDS
    return type(value) is float or isinstance(value, int | float | np.number)


class Reports:
    """The names of the reported metrics of a run, by group and step.

    In a trial of an experiment these include the reports of an earlier ``core.init()`` of the same run.
    """

    def __init__(self, task: TrialTask | None = None) -> None:
        self._task = task
        self._names: dict[str, dict[Any, frozenset[str]]] | None = None

    def _find_names(self, group: str) -> dict[Any, frozenset[str]]:
        """Return the names of a group's metrics by step, those of earlier reports included."""
        if self._names is None:
            self._names = defaultdict(dict)
            for record in [] if self._task is None else self._task.read_reports():
                names = self._names[record["group"]]
                steps = record["steps_completed"]
                names[steps] = names.get(steps, frozenset()) | record["metrics"].keys()
        return self._names[group]

    def add(self, group: str, steps_completed: Any, metrics: Mapping[str, Any]) -> int | float:
        """Record a report and return its steps as a number; a ValueError names all mistakes."""
        steps = read_report(steps_completed)
        mistakes = [*find_mistakes_in_steps(steps, self._task is not None), *_find_mistakes_in_epoch(metrics)]
        names = self._find_names(group)
        before = frozenset() if mistakes else names.get(steps, frozenset())
        known = sorted(before.intersection(map(str, metrics)))
        if known:
            mistakes.append(
                f"{', '.join(map(repr, known))} had a value after {steps:,} steps already; report one value of a "
                "metric for a step, and others under names of their own"
            )
        if mistakes:
            raise ValueError(f"Metrics of the group {group!r} cannot be reported: {'; '.join(mistakes)}.")
        names[steps] = before.union(map(str, metrics))
        return int(steps) if steps == int(steps) else float(steps)


def read_report(value: Any) -> Any:
    """Return a reported value as in JSON: numpy's numbers become plain, NaN becomes text."""
    try:
        return spell_numbers(as_plain(value))
    except TypeError:
        return value


def find_mistakes_in_steps(steps: Any, whole: bool = True) -> Iterable[str]:
    """Yield the mistakes in a value of ``steps_completed``."""
    is_number = isinstance(steps, int | float) and not isinstance(steps, bool)
    if not is_number or steps < 0 or (whole and steps != int(steps)):
        yield f"steps_completed must be a {'whole ' if whole else ''}number, at least 0; got {short_text(steps)}"


def _find_mistakes_in_epoch(metrics: Mapping[str, Any]) -> Iterable[str]:
    epoch = read_report(metrics.get("epoch"))
    if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int | float)):
        yield f"the metric 'epoch' must be a finite number; got {short_text(epoch)}"
