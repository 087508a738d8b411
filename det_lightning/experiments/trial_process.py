"""A running trial as the runner sees it: a process to command, files to read, and the log that it writes itself."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from det_lightning.core._task import NODES, TrialTask, read_record
from det_lightning.errors import PREEMPTED_EXIT_CODE
from det_lightning.escaping import get_logger
from det_lightning.experiments import supervisor
from det_lightning.experiments.hook_progress import describe_hook_end
from det_lightning.experiments.node_logs import copy_node_logs
from det_lightning.experiments.supervisor import Process
from det_lightning.files.local_files import NO_LOCKS, is_locked

logger = get_logger(__name__)

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
        """Warn why a line is left out, for the first such lines of the file, once per process."""
        self._left_out += 1
        if self._left_out <= _MOST_NAMED:
            more = " Further such lines are not named." if self._left_out == _MOST_NAMED else ""
            _warn_once(f"Line {line} of {self._file} is left out: it {reason}.{more}")


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


class TrialProcess:
    """A run of a trial, or its part on a node, under a supervisor that ends soon after the trial or the runner.

    The run may take ``grace_s`` to save and end on request. The supervisor of a ``detached`` run is not a child of this
    process, because the end of this process may end all children. Raise an OSError if the run cannot be started.
    """

    def __init__(
        self,
        task: TrialTask,
        command: list[str],
        workdir: Path,
        environment: dict[str, str],
        grace_s: float,
        detached: bool = False,
    ) -> None:
        self._task = task
        self._processes = RunProcesses(task.node_directory, task.run_id, grace_s)
        settings = {
            "command": command,
            "directory": str(task.node_directory),
            "task": str(task.directory / "task.json"),
            "workdir": str(workdir),
            "run": task.run_id,
            "grace_s": grace_s,
            "detached": detached,
            "no_locks": sorted(NO_LOCKS),
        }
        self._problem = ""
        with (task.node_directory / "log.txt").open("ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(settings)],
                env={**environment, supervisor.RUN_VARIABLE: _name_run(task.node_directory, task.run_id)},
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
        return self._processes.have_ended()

    def problem(self) -> str | None:
        """Return why an ended run has failed, if the entrypoint did not begin or its status is lost."""
        status = self._supervisor.returncode
        if not self._problem and not status:
            return describe_hook_end(self._task.node_directory)
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{self._problem or f'its supervisor {ended}'} (see trials/{self._task.trial_id}/log.txt)"

    def exit_status(self) -> int | None:
        """Return the exit status of an ended run, as a shell shows it; None if the supervisor was killed."""
        return read_status(self._task.node_directory, self._task.run_id)

    def stop(self) -> None:
        self._send(supervisor.STOP)

    def kill(self) -> None:
        self._send(supervisor.KILL)
        self._processes.hurry()

    def _send(self, command: bytes) -> None:
        stream = self._supervisor.stdin
        # It may have ended a moment ago.
        with contextlib.suppress(BrokenPipeError):
            if stream is not None:
                stream.write(command)
                stream.flush()


class OrphanedRun:
    """A run after the kill of its runner: the supervisor has noticed, and the trial saves and ends within ``grace_s``.

    Without a recorded exit status it was killed as a whole, and counts as preempted.
    """

    def __init__(self, directory: Path, run: int, grace_s: float) -> None:
        self._directory = directory
        self._run = run
        self._processes = [RunProcesses(node, run, grace_s) for node in _list_node_directories(directory)]

    def has_ended(self) -> bool:
        running = [processes for processes in self._processes if not processes.have_ended()]
        copy_node_logs(self._directory, ended=not running)
        return not running

    def problem(self) -> str | None:
        """Return where the start-up hook ended the run, if the entrypoint did not begin."""
        return describe_hook(self._directory)

    def exit_status(self) -> int:
        """Return the exit status; without a record, the status of a preempted run."""
        status = read_run_status(self._directory, self._run)
        return PREEMPTED_EXIT_CODE if status is None else status

    def stop(self) -> None:
        """Do nothing: the run is already ending."""

    def kill(self) -> None:
        for processes in self._processes:
            processes.hurry()


class RunProcesses:
    """The processes of a run. If the supervisor is gone, they get ``grace_s`` to save and end, and are then killed."""

    def __init__(self, directory: Path, run: int, grace_s: float) -> None:
        self._directory = directory
        self._run = run
        self._grace_s = grace_s
        self._deadline: float | None = None

    def have_ended(self) -> bool:
        """Return whether all processes have ended, on this machine or another; end those that the supervisor left."""
        holder = _read_holder(self._directory, self._run)
        left = _find_processes(holder, self._directory, self._run)
        if holder.get("supervisor") in left and self._deadline is None:  # which ends them itself
            return False
        if left and self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s
            # The leader of the session got this signal when the supervisor died.
            _signal([one for one, process in left.items() if process.session == holder.get("session") != one])
        elif left and self._deadline is not None and time.monotonic() > self._deadline:
            _signal(left, signal.SIGKILL)
        return not left and not _is_locked(self._directory)

    def hurry(self) -> None:
        """Kill the processes at the next look, even if the supervisor lives."""
        self._deadline = 0.0


def _name_run(directory: Path, run: int) -> str:
    return f"{directory}/{run}"


def _signal(processes: Iterable[int], number: int = signal.SIGTERM) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _find_processes(holder: dict[str, Any], directory: Path, run: int) -> dict[int, Process]:
    """Return the living processes of a run on this machine: of its session, or with its name in their environment."""
    mark = os.fsencode(f"{supervisor.RUN_VARIABLE}={_name_run(directory, run)}")
    processes = supervisor.list_processes()
    session = holder.get("session") if holder.get("machine") == supervisor.identify_machine() else None
    # While processes of the session live, no other process gets the session's id.
    if session in processes and processes[session].started != holder["started"]:
        session = None
    return {
        number: process
        for number, process in processes.items()
        if process.session == session or mark in _read_environment(number)
    }


def _read_environment(process: int) -> list[bytes]:
    with contextlib.suppress(OSError):  # another user's, or just ended
        return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return []


def _read_holder(directory: Path, run: int) -> dict[str, Any]:
    """Return what a run's supervisor noted about its processes; empty once another run has noted something."""
    try:
        holder = json.loads((directory / "lock").read_bytes())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) and holder.get("run") == run else {}


def _list_node_directories(directory: Path) -> list[Path]:
    """Return the directories of the nodes of a trial's newest run; the trial's own if there is only one node."""
    return sorted(directory.glob(f"{NODES}/*")) or [directory]


def choose_status(statuses: Sequence[int | None]) -> int | None:
    """Return the exit status of a run by those of its nodes: the first of a failure, else of a preemption, else 0."""
    failures = [status for status in statuses if status not in (0, PREEMPTED_EXIT_CODE)]
    known = [status for status in failures if status is not None]
    return (known or failures)[0] if failures else max(status or 0 for status in statuses)


def describe_hook(directory: Path) -> str | None:
    """Return where the start-up hook ended the newest run of a trial on any node; None if the entrypoint began."""
    return next(filter(None, map(describe_hook_end, _list_node_directories(directory))), None)


def read_run_status(directory: Path, run: int) -> int | None:
    """Return the exit status of a trial's run on all nodes, as recorded by the supervisors; None without a record."""
    return choose_status([read_status(node, run) for node in _list_node_directories(directory)])


def read_status(directory: Path, run: int) -> int | None:
    """Return the exit status recorded by the supervisor of a run on one node; None without a record."""
    file = directory / "exit.json"
    try:
        record: Any = json.loads(file.read_text()) if file.is_file() else {"run": None}
        return int(record["status"]) if record["run"] == run else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def is_running(directory: Path, run: int) -> bool:
    """Return whether a run of the trial is still active, perhaps without a runner."""
    nodes = _list_node_directories(directory)
    return any(_is_locked(node) or _find_processes(_read_holder(node, run), node, run) for node in nodes)


def _is_locked(directory: Path) -> bool:
    try:
        return is_locked(directory / "lock") is True
    except FileNotFoundError:
        return False
