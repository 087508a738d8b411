"""Runs trials on the nodes of a Ray cluster, each under a placement group with an actor on each node of the trial.

The module uses only Ray's placement groups, actors and resources. Ray Tune has a separate search and state, saved only
at intervals, and would have to agree with the experiment's log.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from det_lightning.errors import PREEMPTED_EXIT_CODE
from det_lightning.escaping import name_some
from det_lightning.experiments.directory import ExperimentDirectory, Options
from det_lightning.experiments.launcher import Demand, Launcher, Record, TrialStart
from det_lightning.experiments.node_logs import copy_node_logs
from det_lightning.experiments.placement import Shape, choose_shape, count_trials, name_resources, require_shape
from det_lightning.experiments.ray_cluster import check_shared, list_nodes
from det_lightning.experiments.ray_node_run import NodeRun, TrialActor, explain_loss
from det_lightning.experiments.state import ExperimentState, TrialRecord
from det_lightning.experiments.trial_process import choose_status

# How long the other nodes of a failed run may take to end by themselves.
_FAILED_S = 30.0
# How long a trial waits for a place before the log says so, and how often another shape is looked for.
_SAYS_S = 5.0


class Places:
    """The places for an experiment's trials on the cluster of this process, whose nodes come and go.

    Raise an ExperimentError if the present nodes have no place for a trial.
    """

    def __init__(self, demand: Demand) -> None:
        demand.check_limit()
        nodes = list_nodes()
        self._slots = max(demand.slots_per_trial, 1)
        self._max_slots = demand.max_slots
        self.resources = name_resources(demand, nodes)
        self._shape = require_shape(self._slots, self.resources, nodes)

    def find_shape(self) -> Shape:
        """Return the shape of a trial on the present nodes; if it does not fit, the last shape that did."""
        self._shape = choose_shape(self._slots, self.resources, list_nodes()) or self._shape
        return self._shape

    def count_room(self) -> int:
        """Return how many trials can run at once."""
        on_nodes = count_trials(self.find_shape(), list_nodes())
        return on_nodes if self._max_slots is None else min(on_nodes, self._max_slots // self._slots)


class RayLauncher(Launcher):
    """Starts trials on the nodes of the cluster of this process."""

    def __init__(
        self, directory: ExperimentDirectory, config: dict[str, Any], options: Options, demand: Demand
    ) -> None:
        self._places = Places(demand)
        super().__init__(directory, config, options, demand, are_gpus="GPU" in self._places.resources)
        self._runs: dict[int, RayRun] = {}

    @staticmethod
    def check(demand: Demand, folder: Path) -> None:
        """Check that the nodes have a place for a trial, and share ``folder`` with this machine."""
        needs = Places(demand).find_shape().needs
        suitable = [node for node in list_nodes() if node.count_parts(needs)]
        folder = folder.absolute()
        check_shared(next(path for path in (folder, *folder.parents) if path.is_dir()), suitable)

    def has_room(self) -> bool:
        """Return whether the nodes can run another trial, even if the trial must wait for other users or a node."""
        return len(self._runs) < max(self._places.count_room(), 1)

    def start(self, trial: TrialRecord, state: ExperimentState, record: Record) -> RayRun:
        shape = self._places.find_shape()
        start = self.prepare(trial, state, list(range(shape.nodes * shape.needs["CPU"])))
        run = RayRun(start, self._places, record)
        self._runs[trial.trial_id] = run
        return run

    def release(self, trial_id: int) -> None:
        run = self._runs.pop(trial_id, None)
        if run is not None:
            run.release()


class RayRun:
    """A run of a trial on some nodes; Ray may not have found a place yet.

    If a node's part fails or is lost, the other nodes are asked to save and end, and are killed soon after.
    """

    def __init__(self, start: TrialStart, places: Places, record: Record) -> None:
        self._start = start
        self._places = places
        self._record = record
        self._said_that_it_waits = False
        self._request: str | None = None
        self._end: tuple[int | None, str | None] | None = None  # status and problem of a run without parts
        self._kill_at_s: float | None = None
        self._parts: list[NodeRun] = []
        self._ended: list[NodeRun] = []  # in the order in which they ended, or were lost
        self._reserve()

    def _reserve(self) -> None:
        """Ask Ray for a place for an actor on each node."""
        self._shape = self._places.find_shape()
        needs = self._shape.needs
        self._group = placement_group([dict(needs)] * self._shape.nodes, strategy="STRICT_SPREAD")
        # The methods run concurrently, because run() lasts until the end of the trial.
        options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "max_concurrency": 4}
        places = [PlacementGroupSchedulingStrategy(self._group, index) for index in range(self._shape.nodes)]
        actor_classes = [ray.remote(TrialActor).options(**options, scheduling_strategy=place) for place in places]
        self._actors = [actor_class.remote(os.environ.get("OMP_NUM_THREADS")) for actor_class in actor_classes]
        self._located = [actor.locate.remote() for actor in self._actors]
        self._look_again_at_s = time.monotonic() + _SAYS_S

    def has_ended(self) -> bool:
        if not self._parts:
            self._wait_for_place()
        if not self._parts:
            return self._end is not None
        self._ended += [part for part in self._parts if part not in self._ended and part.is_over()]
        self._pass_on_request()
        running = [part for part in self._parts if not part.has_ended()]
        if len(self._parts) > 1:
            copy_node_logs(self._start.task.directory, ended=not running)
        return not running

    def exit_status(self) -> int | None:
        """Return the exit status; None if an actor or a node was lost before the end."""
        return self._end[0] if self._end else choose_status([part.exit_status() for part in self._ended])

    def problem(self) -> str | None:
        """Return why the run has failed, if the entrypoint did not begin or its status is lost."""
        return self._end[1] if self._end else next(filter(None, (part.problem() for part in self._ended)), None)

    def stop(self) -> None:
        # Left to the next has_ended(), because the calling signal handler may have interrupted a call to Ray.
        self._request = "stop"

    def kill(self) -> None:
        self._request = "kill"

    def release(self) -> None:
        remove_placement_group(self._group)

    def _wait_for_place(self) -> None:
        """Start the parts once Ray has started all actors."""
        if self._request is not None:
            self._end = PREEMPTED_EXIT_CODE, None
            return
        if len(ray.wait(self._located, num_returns=len(self._located), timeout=0)[0]) == len(self._located):
            self._begin()
            return
        if time.monotonic() < self._look_again_at_s:
            return
        self._look_again_at_s += _SAYS_S
        if not self._said_that_it_waits:
            self._said_that_it_waits = True
            text = f"Trial {self._start.task.trial_id} waits for {self._shape} that are free at the same time."
            nodes = name_some([node.describe(self._places.resources) for node in list_nodes()])
            self._record("message", text=f"{text} The nodes are {nodes}.")
        if self._places.find_shape() != self._shape:
            self.release()
            self._reserve()

    def _begin(self) -> None:
        try:
            found = ray.get(self._located)
        except RayError as error:
            self._end = explain_loss(error, self._start)
            return
        addresses = [address for address, _, _ in found]
        self._parts = [
            NodeRun(actor, node_id, self._start.take_part(rank, addresses, found[0][1]))
            for rank, (actor, (_, _, node_id)) in enumerate(zip(self._actors, found, strict=True))
        ]
        names = {node.node_id: node.name for node in list_nodes()}
        nodes = [names.get(node_id, address) for address, _, node_id in found]
        self._record("run_placed", trial=self._start.task.trial_id, nodes=nodes)

    def _pass_on_request(self) -> None:
        """Pass on a request, or that of a part that has not ended well, to the other parts."""
        request, self._request = self._request, None
        statuses = [part.exit_status() for part in self._ended]
        if self._kill_at_s is None and any(status != 0 for status in statuses) and len(self._parts) > 1:
            is_preempted = choose_status(statuses) == PREEMPTED_EXIT_CODE
            self._kill_at_s = time.monotonic() + (self._start.grace_s if is_preempted else _FAILED_S)
            request = request or "stop"
        if self._kill_at_s is not None and time.monotonic() > self._kill_at_s:
            self._kill_at_s = float("inf")
            request = "kill"
        if request is not None:
            for part in self._parts:
                part.ask(request)
