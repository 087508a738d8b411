"""The processes of a run, as Lightning sees them, if they were launched and connected without it."""

from __future__ import annotations

import os

from det_lightning.adapters.lightning_package import ClusterEnvironment
from det_lightning.ranks.topology import ProcessTopology


class ContextEnvironment(ClusterEnvironment):
    """Tells Lightning the process topology, so that it launches nothing itself."""

    def __init__(self, topology: ProcessTopology) -> None:
        super().__init__()
        self._topology = topology

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return False  # it is passed to a strategy, never detected

    def world_size(self) -> int:
        return self._topology.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the topology is fixed."""

    def global_rank(self) -> int:
        return self._topology.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the topology is fixed."""

    def local_rank(self) -> int:
        return self._topology.local_rank

    def node_rank(self) -> int:
        return self._topology.cross_rank
