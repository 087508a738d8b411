"""Places for trials on the nodes of a cluster, without a cluster."""

from __future__ import annotations

import pytest

from det_lightning import errors
from det_lightning.experiments.launcher import Demand
from det_lightning.experiments.placement import Node, Shape, choose_shape, count_trials, name_resources, require_shape


def nodes_with(*cpus: int, gpus: int = 0) -> list[Node]:
    return [Node(str(i), f"node{i}", {"CPU": float(number), "GPU": gpus}) for i, number in enumerate(cpus)]


@pytest.mark.parametrize(
    ("slots", "cpus", "expected"),
    [
        (4, (4, 4), (1, 4)),
        (6, (4, 4), (2, 3)),
        (6, (3, 8), (1, 6)),
        (8, (6, 2, 2, 1, 2), (4, 2)),
        (8, (4, 2, 2), None),
        (1, (), None),
    ],
)
def test_trial_is_on_the_fewest_nodes(slots: int, cpus: tuple[int, ...], expected: tuple[int, int] | None) -> None:
    shape = choose_shape(slots, ["CPU"], nodes_with(*cpus))
    assert shape == (None if expected is None else Shape(expected[0], {"CPU": expected[1]}))


@pytest.mark.parametrize(
    ("nodes", "slots", "cpus", "expected"),
    [(1, 2, (4, 5), 4), (2, 4, (4, 4), 1), (2, 2, (8, 2), 1), (2, 2, (4, 4, 4), 3), (3, 2, (4, 2), 0), (1, 4, (3,), 0)],
)
def test_trials_at_once_are_counted(nodes: int, slots: int, cpus: tuple[int, ...], expected: int) -> None:
    assert count_trials(Shape(nodes, {"CPU": slots}), nodes_with(*cpus)) == expected


@pytest.mark.parametrize(
    ("demand", "gpus", "expected"),
    [
        (Demand(2), 1, ["CPU", "GPU"]),
        (Demand(2, on_cpu=True), 1, ["CPU"]),
        (Demand(1), 0, ["CPU"]),
        (Demand(1), 1, ["CPU", "GPU"]),
        (Demand(0), 1, ["CPU"]),
    ],
)
def test_slots_are_gpus_if_there_are_any(demand: Demand, gpus: int, expected: list[str]) -> None:
    assert name_resources(demand, nodes_with(4, gpus=gpus)) == expected


def test_trial_without_a_place_is_refused() -> None:
    with pytest.raises(errors.ExperimentError) as caught:
        require_shape(5, ["CPU", "GPU"], nodes_with(4, 8))
    assert str(caught.value) == (
        "resources.slots_per_trial is 5, and the Ray cluster has no place for such a trial: one node with 5 CPUs and 5 "
        "GPUs, or several nodes with equal parts of them. The nodes are node0 with 4 CPUs and no GPUs, node1 with 8 "
        "CPUs and no GPUs. Use --cpu for 5 processes on the CPU, or --slots N for another number, or add a node."
    )
