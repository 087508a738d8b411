"""Where the trials of an experiment fit on the nodes of a cluster: as few nodes as possible, with equal parts.

Change here: a resource of trials is one of ``name_resources`` and of ``Shape.needs``. ``make_demand`` in
``experiments/lifecycle.py`` asks for it, and ``experiments/ray_launcher.py`` reserves it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from det_lightning import errors
from det_lightning.escaping import name_some
from det_lightning.experiments.launcher import Demand


@dataclasses.dataclass(frozen=True)
class Shape:
    """The nodes of a trial: their number, and the resources that the trial takes on each."""

    nodes: int
    needs: dict[str, int]

    def __str__(self) -> str:
        resources = " and ".join(f"{number} {name}{'s' * (number > 1)}" for name, number in self.needs.items())
        return f"a node with {resources}" if self.nodes == 1 else f"{self.nodes} nodes with {resources} each"


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of a cluster, with all its resources, in use or not."""

    node_id: str
    name: str
    resources: dict[str, float]

    @classmethod
    def from_ray(cls, node: dict[str, Any]) -> Node:
        """Return a node of ``ray.nodes()``, named after its host unless it was started with a name."""
        address, name = node["NodeManagerAddress"], node["NodeName"]
        return cls(node["NodeID"], node["NodeManagerHostname"] if name == address else name, node["Resources"])

    def count_parts(self, needs: dict[str, int]) -> int:
        """Return how many parts of trials with these needs the node can run at once if otherwise idle."""
        return min(int(self.resources.get(name, 0)) // number for name, number in needs.items())

    def describe(self, resources: Sequence[str]) -> str:
        """Return the node's name and some of its resources in words, such as ``a with 4 CPUs and no GPUs``."""
        numbers = [f"{int(self.resources.get(resource, 0)) or 'no'} {resource}s" for resource in resources]
        return f"{self.name} with {' and '.join(numbers)}"


def name_resources(demand: Demand, nodes: Sequence[Node]) -> list[str]:
    """Return the resources that each slot takes: a CPU, and a GPU if GPUs are used."""
    has_gpus = any(node.count_parts({"GPU": 1}) for node in nodes)
    slots = demand.slots_per_trial
    on_cpu = demand.on_cpu or slots == 0 or (slots == 1 and not has_gpus)
    return ["CPU"] if on_cpu else ["CPU", "GPU"]


def choose_shape(slots: int, resources: Sequence[str], nodes: Sequence[Node]) -> Shape | None:
    """Return the shape of a trial with the fewest nodes, with equal parts; None if the nodes have no place for it."""
    for number in [number for number in range(1, len(nodes) + 1) if slots % number == 0]:
        needs = dict.fromkeys(resources, slots // number)
        if sum(node.count_parts(needs) > 0 for node in nodes) >= number:
            return Shape(number, needs)
    return None


def require_shape(slots: int, resources: Sequence[str], nodes: Sequence[Node]) -> Shape:
    """Return the shape of a trial; raise an ExperimentError that names the nodes if the trial can never run."""
    if (shape := choose_shape(slots, resources, nodes)) is not None:
        return shape
    found = name_some([node.describe(resources) for node in nodes])
    on_cpus = "" if "GPU" not in resources else f" --cpu for {slots} processes on the CPU, or"
    raise errors.ExperimentError(
        f"resources.slots_per_trial is {slots}, and the Ray cluster has no place for such a trial: one node with "
        f"{' and '.join(f'{slots} {name}s' for name in resources)}, or several nodes with equal parts of them. The "
        f"nodes are {found}. Use{on_cpus} --slots N for another number, or add a node."
    )


def count_trials(shape: Shape, nodes: Sequence[Node]) -> int:
    """Return how many trials of a shape the nodes can run at once if otherwise idle."""
    parts = [node.count_parts(shape.needs) for node in nodes]
    # The parts of a trial are on different nodes.
    most = sum(parts) // shape.nodes
    return next(n for n in range(most, -1, -1) if sum(min(part, n) for part in parts) >= shape.nodes * n)
