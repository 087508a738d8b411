"""The entries that each type of event must have, so that a damaged or forged log is rejected before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_Is = Callable[[Any], bool]

# The year 10000, later than any clock shows.
_LATEST_TIME_S = 253402300800.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_time(value: Any) -> bool:
    return _is_number(value) and 0 <= value < _LATEST_TIME_S


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_text_or_none(value: Any) -> bool:
    return isinstance(value, str | None)


_OF_TRIAL: dict[str, _Is] = {"trial": _is_whole}
_FORMS: dict[str, dict[str, _Is]] = {
    "trial_created": {**_OF_TRIAL, "seed": _is_whole, "hparams": _is_dict},
    "run_started": {**_OF_TRIAL, "run": _is_whole},
    "validation": {**_OF_TRIAL, "steps_completed": _is_number, "metrics": _is_dict},
    "validation_extended": {**_OF_TRIAL, "steps_completed": _is_number, "metrics": _is_dict},
    "checkpoint": {**_OF_TRIAL, "steps_completed": _is_number, "checkpoint_id": _is_text},
    "checkpoint_deleted": {**_OF_TRIAL, "checkpoint_id": _is_text},
    "early_exit": {**_OF_TRIAL, "reason": _is_text},
    "preempted": _OF_TRIAL,
    "startup_hook_ended_the_run": _OF_TRIAL,
    "stop_requested": _OF_TRIAL,
    "run_ended": {
        **_OF_TRIAL,
        "failed": lambda value: isinstance(value, bool),
        "paused": lambda value: isinstance(value, bool),
        "closed": lambda value: value in (None, "COMPLETED", "ERROR", "CANCELED"),
        "reason": _is_text_or_none,
    },
    "experiment_ended": {"outcome": _is_text},
    "message": {"text": _is_text},
}
_TIMED = {"run_started", "checkpoint", "run_ended"}


def find_mistake(event: Mapping[str, Any], trials: set[int]) -> str | None:
    """Return the name of a missing or wrong entry of an event, or None; unknown types need no entries of their own.

    ``trials`` are those that earlier events created; a trial that this event creates is added.
    """
    kind = event["type"]
    if kind == "trial_created" and _is_whole(event.get("trial")):
        trials.add(event["trial"])
    for name, is_right in _FORMS.get(kind, {}).items():
        if name not in event or not is_right(event[name]):
            return name
    if (kind in _TIMED or "time" in event) and not _is_time(event.get("time")):
        return "time"
    of_trial = "trial" in _FORMS.get(kind, {}) or "lines" in event
    if of_trial and (not _is_whole(event.get("trial")) or event["trial"] not in trials):
        return "trial"
    return None if _is_whole(event.get("lines", 0)) else "lines"
