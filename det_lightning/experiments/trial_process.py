"""A running trial seen by the runner: a process to command, and files to read."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from det_lightning.core._task import read_record
from det_lightning.errors import PREEMPTED_EXIT_CODE
from det_lightning.escaping import escape
from det_lightning.experiments import supervisor
from det_lightning.experiments.hook_run import describe_hook_end
from det_lightning.files.local_files import NO_LOCKS, is_locked

logger = logging.getLogger(__name__)

_MOST_NAMED = 5


class RecordReader:
    """Reads new records in a trial's ``metrics.jsonl``, after the first ``lines_read`` lines."""

    def __init__(self, file: Path, lines_read: int = 0) -> None:
        self.lines_read = lines_read
        self._file = file
        self._left_out = 0
        self._offset: int | None = 0 if lines_read == 0 else None

    def new_records(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the complete records since the last call, with line numbers."""
        try:
            with self._file.open("rb") as file:
                if self._offset is None:
                    self._offset = sum(len(file.readline()) for _ in range(self.lines_read))
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        records = []
        for line in complete.split(b"\n")[:-1]:
            self.lines_read += 1
            try:
                records.append((self.lines_read, read_record(line)))
            except ValueError as e:
                self.leave_out(self.lines_read, str(e))
        return records

    def leave_out(self, line: int, reason: str) -> None:
        """Say, once in a process, why a line is left out, of the first such lines of the file."""
        self._left_out += 1
        if self._left_out <= _MOST_NAMED:
            more = " Further such lines are not named." if self._left_out == _MOST_NAMED else ""
            _warn_once(f"Line {line} of {escape(self._file)} is left out: it {reason}.{more}")


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


class TrialProcess:
    """A run of a trial, under a supervisor that ends soon after the trial or the runner.

    The run may take ``grace_s`` to save and end on request. The supervisor of a ``detached`` run is not a child of this
    process, because the end of this process may end all children. Raise an OSError if the run cannot be started.
    """

    def __init__(
        self,
        directory: Path,
        command: list[str],
        workdir: Path,
        environment: dict[str, str],
        run: int,
        grace_s: float,
        detached: bool = False,
    ) -> None:
        self._directory = directory
        self._run = run
        settings = {
            "command": command,
            "directory": str(directory),
            "workdir": str(workdir),
            "run": run,
            "grace_s": grace_s,
            "detached": detached,
            "no_locks": sorted(NO_LOCKS),
        }
        self._problem = ""
        with (directory / "log.txt").open("ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(settings)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        if detached:
            self._supervisor.wait()

    def has_ended(self) -> bool:
        # The supervisor writes only why it fails, and its end closes the pipe, even for a detached run.
        pipe = self._supervisor.stdout
        if pipe is not None and not select.select([pipe], [], [], 0)[0]:
            return False
        if pipe is not None:
            self._problem += pipe.read().decode()
        self._supervisor.wait()
        return True

    def problem(self) -> str | None:
        """Return why an ended run has failed, if the entrypoint did not begin or its status is lost."""
        status = self._supervisor.returncode
        if not self._problem and not status:
            return describe_hook_end(self._directory)
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{self._problem or f'its supervisor {ended}'} (see trials/{self._directory.name}/log.txt)"

    def exit_status(self) -> int | None:
        """Return the exit status of an ended run, as a shell shows it; None if the supervisor was killed."""
        return read_status(self._directory, self._run)

    def stop(self) -> None:
        self._send(supervisor.STOP)

    def kill(self) -> None:
        self._send(supervisor.KILL)

    def _send(self, command: bytes) -> None:
        stream = self._supervisor.stdin
        # It may have ended a moment ago.
        with contextlib.suppress(BrokenPipeError):
            if stream is not None:
                stream.write(command)
                stream.flush()


class OrphanedRun:
    """A run after the kill of its runner: the supervisor has noticed, and the trial saves and ends.

    Without a recorded exit status, all processes were killed at once, and the run counts as preempted.
    """

    def __init__(self, directory: Path, run: int) -> None:
        self._directory = directory
        self._run = run

    def has_ended(self) -> bool:
        return not is_running(self._directory)

    def problem(self) -> str | None:
        """Return where the start-up hook ended the run, if the entrypoint did not begin."""
        return describe_hook_end(self._directory)

    def exit_status(self) -> int:
        """Return the exit status; without a record, the status of a preempted run."""
        status = read_status(self._directory, self._run)
        return PREEMPTED_EXIT_CODE if status is None else status

    def stop(self) -> None:
        """Do nothing: the run is already ending."""

    def kill(self) -> None:
        """Do nothing: the supervisor kills a run that takes too long."""


def read_status(directory: Path, run: int) -> int | None:
    """Return the exit status recorded by the supervisor of a run; None without a record."""
    file = directory / "exit.json"
    try:
        record: Any = json.loads(file.read_text()) if file.is_file() else {"run": None}
        return int(record["status"]) if record["run"] == run else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def is_running(directory: Path) -> bool:
    """Return whether a run of the trial is still active, perhaps without a runner."""
    try:
        return is_locked(directory / "lock") is True
    except FileNotFoundError:
        return False
