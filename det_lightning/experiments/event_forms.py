"""The entries that each type of event must have, so that a damaged or forged log is rejected before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any

# The year 10000, later than any clock shows.
_LATEST_TIME_S = 253402300800.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


# A type, or what says whether a value is right.
_Form = type | UnionType | Callable[[Any], bool]
_OF_TRIAL: dict[str, _Form] = {"trial": _is_whole}
_FORMS: dict[str, dict[str, _Form]] = {
    "trial_created": {**_OF_TRIAL, "seed": _is_whole, "hparams": dict},
    "run_started": {**_OF_TRIAL, "run": _is_whole},
    "validation": {**_OF_TRIAL, "steps_completed": _is_number, "metrics": dict},
    "validation_extended": {**_OF_TRIAL, "steps_completed": _is_number, "metrics": dict},
    "checkpoint": {**_OF_TRIAL, "steps_completed": _is_number, "checkpoint_id": str},
    "checkpoint_deleted": {**_OF_TRIAL, "checkpoint_id": str},
    "early_exit": {**_OF_TRIAL, "reason": str},
    "preempted": _OF_TRIAL,
    "startup_hook_ended_the_run": _OF_TRIAL,
    "stop_requested": _OF_TRIAL,
    "run_ended": {
        **_OF_TRIAL,
        "failed": bool,
        "paused": bool,
        "closed": lambda value: value in (None, "COMPLETED", "ERROR", "CANCELED"),
        "reason": str | None,
    },
    "trial_retried": _OF_TRIAL,
    "experiment_ended": {"outcome": str},
    "message": {"text": str},
}
# Entries that earlier releases did not write.
_OPTIONAL_FORMS: dict[str, dict[str, _Form]] = {"run_ended": {"steps_completed": _is_number, "invalid_hp": bool}}
_TIMED = {"run_started", "checkpoint", "run_ended"}


def find_mistake(event: Mapping[str, Any], trials: set[int]) -> str | None:
    """Return the name of a missing or wrong entry of an event, or None; unknown types need no entries of their own.

    ``trials`` are those that earlier events created; a trial that this event creates is added.
    """
    kind = event["type"]
    if kind == "trial_created" and _is_whole(event.get("trial")):
        trials.add(event["trial"])
    for name, form in _FORMS.get(kind, {}).items():
        if name not in event or not _fits(event[name], form):
            return name
    for name, form in _OPTIONAL_FORMS.get(kind, {}).items():
        if name in event and not _fits(event[name], form):
            return name
    time: Any = event.get("time")
    if (kind in _TIMED or "time" in event) and not (_is_number(time) and 0 <= time < _LATEST_TIME_S):
        return "time"
    of_trial = "trial" in _FORMS.get(kind, {}) or "lines" in event
    if of_trial and (not _is_whole(event.get("trial")) or event["trial"] not in trials):
        return "trial"
    if not _are_texts(event.get("sha256", [])):
        return "sha256"
    return None if _is_whole(event.get("lines", 0)) else "lines"


def _fits(value: Any, form: _Form) -> bool:
    return isinstance(value, form) if isinstance(form, type | UnionType) else form(value)
