"""Runs trials on the nodes of a Ray cluster, each under an actor that holds the trial's resources.

The module uses only Ray's actors and resources. Ray Tune has a separate search and state, saved only at intervals,
and would have to agree with the experiment's log.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from det_lightning.errors import PREEMPTED_EXIT_CODE
from det_lightning.experiments.directory import ExperimentDirectory, Options
from det_lightning.experiments.hook_progress import describe_hook_end
from det_lightning.experiments.launcher import Launcher, TrialStart
from det_lightning.experiments.state import ExperimentState, TrialRecord
from det_lightning.experiments.trial_process import RunProcesses, read_status

_POLL_S = 0.05
_CANNOT_START = 127
# Variables that Ray sets in workers. The number of threads changes sums, so the runner's number is used.
_SET_BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")


class RayLauncher(Launcher):
    """Starts trials on the nodes of the cluster of this process; ``needs`` are the resources of each."""

    def __init__(
        self,
        directory: ExperimentDirectory,
        config: dict[str, Any],
        options: Options,
        needs: dict[str, int],
        count_room: Callable[[], int],
    ) -> None:
        super().__init__(directory, config, options, are_gpus="GPU" in needs)
        self._needs = needs
        self._count_room = count_room
        self._runs: dict[int, RayRun] = {}
        # The methods run concurrently, because wait() lasts until the end of the trial.
        self._actor_class = ray.remote(TrialActor).options(
            num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0), max_concurrency=4
        )

    def has_room(self) -> bool:
        """Return whether the nodes can run another trial, even if the trial must wait for other users."""
        return len(self._runs) < self._count_room()

    def start(self, trial: TrialRecord, state: ExperimentState) -> RayRun:
        start = self.prepare(trial, state, list(range(self._needs["CPU"])))
        run = RayRun(self._actor_class.remote(start, os.environ.get("OMP_NUM_THREADS")), start)
        self._runs[trial.trial_id] = run
        return run

    def release(self, trial_id: int) -> None:
        run = self._runs.pop(trial_id, None)
        if run is not None:
            run.release()


class TrialActor:
    """Starts a run of a trial on the node of this actor, and waits for the end of the run.

    If the actor's process ends, for whatever reason, the trial notices, saves and ends. ``threads`` is the runner's
    ``OMP_NUM_THREADS``, or None.
    """

    def __init__(self, start: TrialStart, threads: str | None) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in _SET_BY_RAY}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = threads
        devices = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        self._process = start.start(environment, devices, detached=True)

    def confirm(self) -> None:
        """Do nothing: a returned call shows that the run was started."""

    def wait(self) -> tuple[int | None, str | None]:
        """Wait for the end of the run; return the exit status, or None if lost, and the problem, if any."""
        while not self._process.has_ended():
            time.sleep(_POLL_S)
        return self._process.exit_status(), self._process.problem()

    def stop(self) -> None:
        self._process.stop()

    def kill(self) -> None:
        self._process.kill()


class RayRun:
    """A run of a trial on some node; Ray may not have started the actor yet."""

    def __init__(self, actor: Any, start: TrialStart) -> None:
        self._actor = actor
        self._task = start.task
        self._processes = RunProcesses(start.task.directory, start.task.run_id, start.grace_s)
        self._started = actor.confirm.remote()
        self._ending = actor.wait.remote()
        self._request: str | None = None
        self._status: int | None = None
        self._problem: str | None = None
        self._is_lost = False

    def has_ended(self) -> bool:
        self._pass_on_request()
        if not self._is_lost:
            if not _is_ready(self._ending):
                return False
            try:
                self._status, self._problem = ray.get(self._ending)
                return True
            except ActorUnavailableError:
                self._ending = self._actor.wait.remote()
                return False
            except RayError as error:
                self._lose(error)
        # The actor is gone, but perhaps not its node: the trial notices, saves and ends.
        return self._processes.have_ended()

    def exit_status(self) -> int | None:
        """Return the exit status; None if the actor or the node was lost before the end."""
        if self._status is None and read_status(self._task.directory, self._task.run_id) == 0:
            return 0
        return self._status

    def problem(self) -> str | None:
        """Return why the run has failed, if the entrypoint did not begin or its status is lost."""
        return self._problem if self.exit_status() != 0 else describe_hook_end(self._task.directory)

    def stop(self) -> None:
        # Left to the next has_ended(), because the calling signal handler may have interrupted a call to Ray.
        self._request = "stop"

    def kill(self) -> None:
        self._request = "kill"
        self._processes.hurry()

    def release(self) -> None:
        ray.kill(self._actor)

    def _pass_on_request(self) -> None:
        request = self._request
        self._request = None
        if request is None or self._is_lost:
            return
        if _is_ready(self._started):
            getattr(self._actor, request).remote()
        else:
            # The actor is waiting for resources, perhaps for a long time.
            self._is_lost = True
            self._status = PREEMPTED_EXIT_CODE
            ray.kill(self._actor)

    def _lose(self, error: RayError) -> None:
        self._is_lost = True
        never_started = isinstance(error, RayActorError) and error.actor_init_failed
        self._status = _CANNOT_START if never_started else None
        self._problem = f"Ray lost the run: {type(error).__name__} (see trials/{self._task.trial_id}/log.txt)"
        with (self._task.directory / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"det-lightning: Ray lost this run: {error}\n")


def _is_ready(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0)[0])
