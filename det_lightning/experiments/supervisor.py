"""The parent of a trial's processes, which ends the trial when the runner of the experiment ends.

The module runs as a script, ``python supervisor.py SETTINGS``, and imports only the standard library, so that it
costs no more than an interpreter. The runner writes commands to standard input. When the pipe closes, the runner is
gone: the supervisor asks the trial to save and end. If the supervisor fails, its last output tells the runner why.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

#: The environment variable that all processes of a run inherit.
RUN_VARIABLE = "DET_LIGHTNING_RUN"

#: The runner's commands on standard input: save and end; end at once.
STOP = b"s"
KILL = b"k"

_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(settings_json: str) -> int:
    """Run a trial's command to the end and record the exit status; TrialProcess makes the settings.

    A trial may take ``grace_s`` to save and end before the supervisor kills the processes. If ``detached``, the work
    continues in a process that is not a child of the starting process.
    """
    settings = json.loads(settings_json)
    if settings["detached"] and os.fork():
        return 0
    directory = Path(settings["directory"])
    # Signals from the terminal are for the runner; a command follows.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    # An earlier run of this trial, just orphaned, may still be saving. A trial never runs twice at once.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in settings["no_locks"]:  # of which the runner has told
            raise
    if json.loads(Path(settings["task"]).read_text())["run_id"] != settings["run"]:
        return 0  # a later run was started before this one could begin
    status = _supervise(settings, directory, lock)
    draft = directory / "exit.json.tmp"
    draft.write_text(json.dumps({"run": settings["run"], "status": status}))
    draft.replace(directory / "exit.json")
    return 0


def _supervise(settings: dict[str, object], directory: Path, lock: int) -> int:
    prctl = _prctl()
    prctl(_PR_SET_CHILD_SUBREAPER)
    with (directory / "log.txt").open("ab") as log:
        try:
            child = subprocess.Popen(
                settings["command"],  # type: ignore[call-overload]
                cwd=settings["workdir"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock],  # held until the last process of the trial has ended
                preexec_fn=functools.partial(_prepare_child, os.getpid(), lock, settings["run"]),
            )
        except OSError as error:
            log.write(f"det-lightning: the entrypoint cannot be started: {error}\n".encode(errors="backslashreplace"))
            _explain(f"its entrypoint cannot be started: {error}")
            return 127
        try:
            return _wait(child, float(str(settings["grace_s"])))
        finally:
            _kill_descendants()


def _prepare_child(supervisor: int, lock: int, run: object) -> None:
    """Reset the signals changed by Ray and ``supervisor``; make the child end when the supervisor dies.

    The file of the lock then names the processes that hold it. Whoever finds the supervisor dead can end the others.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # Ray blocks SIGINT in all child processes.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _prctl()(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != supervisor:  # it died before the request
        os._exit(1)
    holder = {"run": run, "machine": identify_machine(), "supervisor": supervisor, "session": os.getpid()}
    started = read_process(os.getpid())
    with contextlib.suppress(OSError):  # of a full disk
        os.truncate(lock, 0)
        os.pwrite(lock, json.dumps({**holder, "started": started and started.started}).encode(), 0)


def _wait(child: subprocess.Popen[bytes], grace_s: float) -> int:
    """Pass on the runner's commands until the child has ended; return the status, as a shell shows it."""
    deadline: float | None = None
    listening = [sys.stdin.fileno()]
    while True:
        status = child.poll()
        # A shell ends at once on request, while child processes of the shell are still saving.
        if status is not None and (deadline is None or not _group_lives(child.pid)):
            if deadline is not None and status == -signal.SIGTERM:
                return os.EX_TEMPFAIL  # like a trial that has saved
            return status if status >= 0 else 128 - status
        ready = select.select(listening, [], [], _POLL_S)[0]
        command = os.read(ready[0], 1) if ready else None
        if command == b"":
            listening = []
        if command == KILL or (deadline is not None and time.monotonic() > deadline):
            _signal_group(child.pid, signal.SIGKILL)
        elif command is not None and deadline is None:
            deadline = time.monotonic() + grace_s
            _signal_group(child.pid, signal.SIGTERM)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _group_lives(group: int) -> bool:
    _reap()
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _kill_descendants() -> None:
    """Kill the remaining descendants of the command, whose orphans this process adopts."""
    for _ in range(100):
        found = _descendants(os.getpid())
        if not found:
            return
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        _reap()
        time.sleep(_POLL_S)


class Process(NamedTuple):
    """The parent and the session of a living process, and when it started, in ticks since the machine did."""

    parent: int
    session: int
    started: int


def list_processes() -> dict[int, Process]:
    """Return the living processes by id; none if there is no ``/proc``."""
    found = {int(entry.name): read_process(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
    return {number: process for number, process in found.items() if process is not None}


def read_process(number: int) -> Process | None:
    """Return the process with an id; None if it has ended, or if there is no ``/proc``."""
    try:
        # The program's name, in parentheses, may contain any characters.
        fields = Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else Process(int(fields[1]), int(fields[3]), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def identify_machine() -> str:
    """Return a name of the machine, since its start, and of the container, within which process ids are unique."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _descendants(process: int) -> list[int]:
    """Return the living descendants of ``process``."""
    processes = list_processes()
    found: list[int] = []
    queue = [process]
    while queue:
        current = queue.pop()
        children = [number for number, child in processes.items() if child.parent == current]
        found += children
        queue += children
    return found


def _prctl() -> Callable[..., object]:
    """Return a function that sets an option of Linux's ``prctl``, by default to 1; elsewhere it does nothing."""
    if not sys.platform.startswith("linux"):
        return lambda *_: None
    libc = ctypes.CDLL(None)
    return lambda option, value=1: libc.prctl(option, int(value), 0, 0, 0)


def _explain(reason: str) -> None:
    """Tell the runner why the run has failed; it reads this at the end."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), reason.encode(errors="backslashreplace"))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except Exception as error:
        traceback.print_exc()  # to the trial's log
        _explain(f"its supervisor failed: {type(error).__name__}: {error}")
        sys.exit(1)
