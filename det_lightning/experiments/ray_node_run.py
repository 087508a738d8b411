"""The part of a trial's run on one node of a Ray cluster: an actor there that holds the node's resources."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from det_lightning.experiments.hook_progress import describe_hook_end
from det_lightning.experiments.launcher import TrialStart
from det_lightning.experiments.trial_process import RunProcesses, TrialProcess, read_status
from det_lightning.ranks.topology import free_port

_POLL_S = 0.05
_CANNOT_START = 127
# Variables that Ray sets in workers. The number of threads changes sums, so the runner's number is used.
_SET_BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")


class TrialActor:
    """Starts the part of a run on the node of this actor, and waits for its end.

    If the actor's process ends, for whatever reason, the trial notices, saves and ends. ``threads`` is the runner's
    ``OMP_NUM_THREADS``, or None.
    """

    def __init__(self, threads: str | None) -> None:
        self._environment = {name: value for name, value in os.environ.items() if name not in _SET_BY_RAY}
        if threads is not None:
            self._environment["OMP_NUM_THREADS"] = threads
        self._lock = threading.Lock()
        self._process: TrialProcess | None = None
        self._request: str | None = None

    def locate(self) -> tuple[str, int, str]:
        """Return the address of this node, a free port there, and Ray's id of the node."""
        return ray.util.get_node_ip_address(), free_port(), ray.get_runtime_context().get_node_id()

    def run(self, start: TrialStart) -> tuple[int | None, str | None]:
        """Start the run, unless an earlier call did, and wait for its end.

        Return the exit status, or None if lost, and the problem, if any.
        """
        with self._lock:
            process = self._process
            if process is None:
                devices = ray.get_runtime_context().get_accelerator_ids()["GPU"]
                process = self._process = start.start(self._environment, devices, detached=True)
                self._pass_on_request()
        while not process.has_ended():
            time.sleep(_POLL_S)
        return process.exit_status(), process.problem()

    def ask(self, request: str) -> None:
        """Ask the run to save and end (``stop``), or end it at once (``kill``)."""
        with self._lock:
            self._request = request
            self._pass_on_request()

    def _pass_on_request(self) -> None:
        if self._process is not None and self._request is not None:
            getattr(self._process, self._request)()


class NodeRun:
    """The part of a run on one node, started by an actor of that node."""

    def __init__(self, actor: Any, node_id: str, start: TrialStart) -> None:
        self._actor = actor
        self._node_id = node_id
        self._start = start
        self._directory = start.task.node_directory
        self._processes = RunProcesses(self._directory, start.task.run_id, start.grace_s)
        self._ending = actor.run.remote(start)
        self._has_ended = False
        self._status: int | None = None
        self._problem: str | None = None
        self._is_lost = False
        self._is_killed = False

    def is_over(self) -> bool:
        """Return whether the actor has reported the end of the run, or is lost."""
        if self._has_ended or self._is_lost:
            return True
        if not ray.wait([self._ending], timeout=0)[0]:
            return False
        try:
            self._status, self._problem = ray.get(self._ending)
            self._has_ended = True
        except ActorUnavailableError:
            self._ending = self._actor.run.remote(self._start)
            return False
        except RayError as error:
            self._is_lost = True
            self._status, self._problem = explain_loss(error, self._start)
        return True

    def has_ended(self) -> bool:
        """Return whether all processes of the run on the node have ended, even if the actor is lost."""
        # A lost actor's node may still live: the trial notices, saves and ends.
        return self.is_over() and (self._has_ended or self._processes.have_ended())

    def exit_status(self) -> int | None:
        """Return the exit status; None if the actor or the node was lost before the end."""
        if self._status is None and read_status(self._directory, self._start.task.run_id) == 0:
            return 0
        return self._status

    def problem(self) -> str | None:
        """Return why the run has failed, if the entrypoint did not begin or its status is lost."""
        return self._problem if self.exit_status() != 0 else describe_hook_end(self._directory)

    def ask(self, request: str) -> None:
        """Ask the run to save and end (``stop``), or end it at once (``kill``)."""
        if not self._is_lost:
            self._actor.ask.remote(request)
        elif request == "kill" and not self._is_killed:
            self._is_killed = True
            self._processes.hurry()
            only_there = NodeAffinitySchedulingStrategy(self._node_id, soft=False)
            end_there = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=only_there)(end_processes)
            end_there.remote(self._directory, self._start.task.run_id)


def explain_loss(error: RayError, start: TrialStart) -> tuple[int | None, str]:
    """Return the exit status and the problem of a run that Ray lost, and note the error in the trial's log."""
    task = start.task
    with (task.directory / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"det-lightning: Ray lost this run: {error}\n")
    never_started = isinstance(error, RayTaskError) or (isinstance(error, RayActorError) and error.actor_init_failed)
    what = f"Ray lost the run: {type(error).__name__} (see trials/{task.trial_id}/log.txt)"
    return (_CANNOT_START if never_started else None), what


def end_processes(directory: Path, run: int) -> None:
    """Kill the processes of a run on this node, whose actor was lost."""
    processes = RunProcesses(directory, run, grace_s=0.0)
    processes.hurry()
    while not processes.have_ended():
        time.sleep(_POLL_S)
