"""A Ray cluster of two nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def add_node(cluster: Any, cpus: int, gpus: int = 0) -> Any:
    """Add a node to a cluster; its head, if it has none yet. Ray counts the CPUs and GPUs that it is given."""
    options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "include_log_monitor": False}
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


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two nodes of two CPUs each."""
    pytest.importorskip("ray", reason="Ray is not installed; run tox -e ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster()
        try:
            add_node(cluster, cpus=2)
            add_node(cluster, cpus=2)
            yield cluster
        finally:
            cluster.shutdown()
