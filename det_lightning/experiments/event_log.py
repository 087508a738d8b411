"""The append-only log of an experiment: its only state, from which everything shown or resumed is computed."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import is_shallow
from det_lightning.escaping import escape
from det_lightning.experiments.event_forms import find_mistake
from det_lightning.files.local_files import NoLocks, is_locked, lock_file, open_private
from det_lightning.files.strict_json import to_json

#: Of a log that may come from elsewhere. Several hundred trials with a thousand validations each have a tenth of it.
MOST_BYTES = 2**30


class EventLog:
    """Appends events, each a JSON object on a line of its own, and syncs them to disk.

    Only one process at a time may have it open; others get an ExperimentInUse. A line that a killed process left
    incomplete is removed when the log is opened again.
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
        """Append an event, as strict JSON; it is on disk when this returns."""
        write_line(self._file, event)
        self.events.append(event)

    def close(self) -> None:
        """Let other processes open the log."""
        _runner_file(self.path).unlink(missing_ok=True)
        self._file.close()
        if self._lock is not None:
            self._lock.release()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a log, which may be in use."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise errors.DamagedExperiment(
            f"{escape(path)} has {size:,} bytes; only logs of at most {MOST_BYTES:,} are shown. Either it is damaged, "
            "or another file; or the experiment is very large, and can still be resumed."
        )
    return list(_parse(_complete_part(path), path))


def runner_of(path: Path) -> tuple[int, str] | None:
    """Return the process id and machine name of the process that has a log open; None if unknown, or there is none."""
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
    """Append ``value`` to a file of JSON lines, and sync it to disk."""
    # One write, so that a reader never sees the parts of two lines mixed.
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
