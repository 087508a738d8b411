"""The append-only log of an experiment: events with required entries, from which the state is computed."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import IO, Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import is_shallow
from det_lightning.escaping import escape
from det_lightning.files.local_files import NoLocks, is_locked, lock_file, open_private
from det_lightning.files.strict_json import to_json

#: The limit for a log from elsewhere: ten times several hundred trials with a thousand validations each.
MOST_BYTES = 2**30


# The year 10000, later than any clock shows.
_LATEST_TIME_S = 253402300800.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


# A type, or a function that says whether a value is right.
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
# Entries missing in logs of earlier releases.
_OPTIONAL_FORMS: dict[str, dict[str, _Form]] = {"run_ended": {"steps_completed": _is_number, "invalid_hp": bool}}
_TIMED = {"run_started", "checkpoint", "run_ended"}


def find_mistake(event: Mapping[str, Any], trials: set[int]) -> str | None:
    """Return the name of a missing or wrong entry of an event, or None; unknown types need no entries of their own.

    ``trials`` are the trials of earlier events; the trial of a ``trial_created`` event is added.
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


class EventLog:
    """Appends events, each a JSON object on a line of its own, and syncs the file to disk.

    Only one process at a time may open a log; others get an ExperimentInUse. Opening the log again removes a line left
    incomplete by a killed process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_private(path, "a+b")
        self._lock = None
        with contextlib.suppress(NoLocks):
            self._lock = lock_file(path)
            if self._lock is None:
                self._file.close()
                raise errors.ExperimentInUse(f"The experiment in {path.parent} is run by another process.")
        _runner_file(path).write_text(f"{os.getpid()} {platform.node()}")
        complete = _complete_part(path)
        self.events: list[dict[str, Any]] = list(_parse(complete, path))
        self._file.truncate(len(complete))

    def append(self, event: dict[str, Any]) -> None:
        """Append an event, as strict JSON; the event is on disk when this method returns."""
        write_line(self._file, event)
        self.events.append(event)

    def close(self) -> None:
        """Let other processes open the log."""
        _runner_file(self.path).unlink(missing_ok=True)
        self._file.close()
        if self._lock is not None:
            self._lock.release()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a log, even while a runner appends to the log."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise errors.DamagedExperiment(
            f"{escape(path)} has {size:,} bytes; only logs of at most {MOST_BYTES:,} are shown. The log is damaged, or "
            "another kind of file; or the experiment is very large, and can still be resumed."
        )
    return list(_parse(_complete_part(path), path))


def find_runner(path: Path) -> tuple[int, str] | None:
    """Return process id and machine of the process with the log open; None if unknown, or without a process."""
    if not is_locked(path):
        return None
    try:
        if not _runner_file(path).is_file():
            return None
        number, machine = _runner_file(path).read_text(encoding="utf-8").split(maxsplit=1)
        process = int(number)
    except (OSError, ValueError):
        return None
    # A signal to 0 or a negative number would reach several processes.
    return (process, machine) if process > 0 else None


def _runner_file(path: Path) -> Path:
    return path.with_name("runner.pid")


def write_line(file: IO[bytes], value: dict[str, Any]) -> None:
    """Append ``value`` to a file of JSON lines, and sync the file to disk."""
    # A single write, so a reader never sees the parts of two lines mixed.
    file.write(to_json(value, separators=(",", ":")).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _complete_part(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _parse(content: bytes, path: Path) -> Iterator[dict[str, Any]]:
    trials: set[int] = set()
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        where = f"Line {number} of {escape(path)}"
        if not isinstance(event, dict) or not isinstance(event.get("type"), str) or not is_shallow(event):
            raise errors.DamagedExperiment(f"{where} is not an event of an experiment: {line[:80]!r}.")
        if (wrong := find_mistake(event, trials)) is not None:
            raise errors.DamagedExperiment(
                f"{where} has no usable {wrong!r}, which an event of the type {event['type']!r:.80} needs: "
                f"{line[:80]!r}."
            )
        yield event
