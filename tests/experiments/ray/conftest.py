"""A Ray cluster of two nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.running import processes_with

NAMES = ("first", "second")
# Of the cluster's processes: the process of the tests.
CLUSTER_VARIABLE = "DET_LIGHTNING_TEST_CLUSTER"


def add_node(cluster: Any, cpus: int, gpus: int = 0, **more: Any) -> Any:
    """Add a node to a cluster; its head, if it has none yet. Ray counts the CPUs and GPUs that it is given."""
    options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "include_log_monitor": False, **more}
    if cluster.head_node is None:
        options |= {"include_dashboard": False, "no_monitor": True}
    for attempt in range(1, 4):
        try:
            return cluster.add_node(**options)
        except Exception as error:
            # Ray gives the agents of a node 15 s to start, which is little on a machine that does much else.
            if "timed out" not in str(error) or attempt == 3:
                raise
    return None


def end_node(cluster: Any, name: str, part: Path) -> None:
    """End a node of the cluster with the processes of a part of a trial there, which are no children of Ray's."""
    processes = processes_with(f"DET_LIGHTNING_RUN={part}/")
    table = cluster.global_state.node_table()
    ids = [found["NodeID"] for found in table if found["Alive"] and found["NodeName"] == name]
    (node,) = [node for node in cluster.worker_nodes if node.node_id in ids]
    cluster.remove_node(node, allow_graceful=False)
    for number in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two nodes of two CPUs each, beside a head without any."""
    pytest.importorskip("ray", reason="Ray is not installed; run tox -e ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv(CLUSTER_VARIABLE, str(os.getpid()))
        cluster = Cluster()
        try:
            add_node(cluster, cpus=0)
            for name in NAMES:
                add_node(cluster, cpus=2, node_name=name)
            yield cluster
        finally:
            cluster.shutdown()
