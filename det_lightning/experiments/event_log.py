"""The append-only log of an experiment: events with required entries, from which the state is computed."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from det_lightning import errors
from det_lightning.files.local_files import is_locked, lock_file, open_private
from det_lightning.files.strict_json import is_shallow, to_json

_WITHOUT_LOCKS = (
    "nothing keeps another process from running the experiment at the same time, nor a resumed trial from starting "
    "while the processes of a killed runner still save"
)
_RUNNER = re.compile(r"([1-9]\d{0,9}) (.+)")

_Number = Annotated[float, Field(allow_inf_nan=False)]
_Time = Annotated[float, Field(ge=0, lt=253402300800)]  # up to the year 10000, later than any clock shows
_OF_TRIAL: dict[str, Any] = {"trial": int}
_REPORT = {**_OF_TRIAL, "steps_completed": _Number, "metrics": dict}
_CHECKPOINT = {**_OF_TRIAL, "steps_completed": _Number, "checkpoint_id": str, "time": _Time}
# The required entries by type of event; an entry with a default is missing in logs of earlier releases.
_ENTRIES: dict[str, dict[str, Any]] = {
    "trial_created": {**_OF_TRIAL, "seed": int, "hparams": dict},
    "run_started": {**_OF_TRIAL, "run": int, "time": _Time, "checkpoint": (str | None, None)},
    "run_placed": {**_OF_TRIAL, "nodes": list[str]},
    "validation": _REPORT,
    "validation_extended": _REPORT,
    "checkpoint_begun": {**_CHECKPOINT, "storage": (str | None, None)},
    "checkpoint": _CHECKPOINT,
    "checkpoint_deleted": {**_OF_TRIAL, "checkpoint_id": str},
    "early_exit": {**_OF_TRIAL, "reason": str},
    "preempted": _OF_TRIAL,
    "stop_requested": _OF_TRIAL,
    "run_ended": {
        **_OF_TRIAL,
        "failed": bool,
        "paused": bool,
        "closed": Literal["COMPLETED", "ERROR", "CANCELED"] | None,
        "reason": str | None,
        "time": _Time,
        "steps_completed": (_Number, 0),
        "invalid_hp": (bool, False),
    },
    "trial_retried": _OF_TRIAL,
    "experiment_ended": {"outcome": str},
    "message": {"text": str},
}


class _Event(BaseModel):
    model_config = ConfigDict(strict=True)

    time: _Time = 0.0
    trial: int = 0
    sha256: list[str] = []
    lines: int = 0


def _make_model(kind: str, entries: dict[str, Any]) -> type[_Event]:
    fields: dict[str, Any] = {name: form if isinstance(form, tuple) else (form, ...) for name, form in entries.items()}
    return create_model(kind, __base__=_Event, **fields)


_EVENTS = {kind: _make_model(kind, entries) for kind, entries in _ENTRIES.items()}


def find_mistake(event: Mapping[str, Any], trials: set[int]) -> str | None:
    """Return the name of a missing or wrong entry of an event, or None; unknown types need only the common entries.

    ``trials`` are the trials of earlier events; the trial of a ``trial_created`` event is added.
    """
    kind = event["type"]
    try:
        _EVENTS.get(kind, _Event).model_validate(event)
    except ValidationError as e:
        return str(e.errors()[0]["loc"][0])
    if kind == "trial_created":
        trials.add(event["trial"])
    of_trial = "trial" in _ENTRIES.get(kind, {}) or "lines" in event
    return "trial" if of_trial and event.get("trial") not in trials else None


class EventLog:
    """Appends events, each a JSON object on a line of its own, and syncs the file to disk.

    Only one process at a time may open a log; others get an ExperimentInUse. Opening the log again removes a line left
    incomplete by a killed process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_private(path, "a+b")
        # Not the log itself: filelock before 4.2.1 empties what it locks, and Python 3.10 has no later one.
        self._lock = lock_file(
            _runner_file(path), f"{os.getpid()} {platform.node()}".encode(), unprotected=_WITHOUT_LOCKS
        )
        if self._lock is None:
            self._file.close()
            raise errors.ExperimentInUse(f"The experiment in {path.parent} is run by another process.")
        complete = _complete_part(path)
        self.events: list[dict[str, Any]] = list(_parse(complete, path))
        self._file.truncate(len(complete))

    def append(self, event: dict[str, Any]) -> None:
        """Append an event, as strict JSON; the event is on disk when this method returns."""
        write_line(self._file, event)
        self.events.append(event)

    def close(self) -> None:
        """Let other processes open the log."""
        self._file.close()
        if self._lock is not None:
            self._lock.remove()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a log, even while a runner appends to the log."""
    return list(_parse(_complete_part(path), path))


class Runner(NamedTuple):
    """The process that runs an experiment; without file locks it may have been killed already."""

    process: int
    machine: str
    is_locked: bool


def find_runner(path: Path) -> Runner | None:
    """Return the process that has the log open; None if there is none or it is unknown."""
    file = _runner_file(path)
    with contextlib.suppress(OSError):
        if not file.is_file() or (locked := is_locked(file)) is False:
            return None
        # A signal to 0 or a negative number would reach several processes.
        if found := _RUNNER.fullmatch(file.read_text(errors="replace")):
            runner = Runner(int(found[1]), found[2], bool(locked))
            return None if not locked and _has_ended(runner) else runner
    return None


def _has_ended(runner: Runner) -> bool:
    """Return whether a process of this machine is known to have ended."""
    try:
        if runner.machine == platform.node():
            os.kill(runner.process, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


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
        where = f"Line {number} of {path}"
        if not isinstance(event, dict) or not isinstance(event.get("type"), str) or not is_shallow(event):
            raise errors.DamagedExperiment(f"{where} is not an event of an experiment: {line[:80]!r}.")
        if (wrong := find_mistake(event, trials)) is not None:
            raise errors.DamagedExperiment(
                f"{where} has no usable {wrong!r}, which an event of the type {event['type']!r:.80} needs: "
                f"{line[:80]!r}."
            )
        yield event
