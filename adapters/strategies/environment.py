"""Lightning's view of processes that were launched and connected without Lightning."""

from __future__ import annotations

import os

from det_lightning.adapters.lightning_package import ClusterEnvironment
from det_lightning.ranks.topology import ProcessTopology


class ContextEnvironment(ClusterEnvironment):
    """Tells Lightning the process topology, so that Lightning launches no processes."""

    def __init__(self, topology: ProcessTopology) -> None:
        super().__init__()
        self._topology = topology

    @property
    def creates_processes_externally(self) -> bool:
        """True: the processes exist."""
        return True

    @property
    def main_address(self) -> str:
        """The address of the chief, from ``MASTER_ADDR``."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The port of the chief, from ``MASTER_PORT``."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Return False: a strategy gets the environment as an argument."""
        return False  # a strategy gets the environment as an argument

    def world_size(self) -> int:
        """Return the number of processes."""
        return self._topology.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the topology is fixed."""

    def global_rank(self) -> int:
        """Return the rank of this process."""
        return self._topology.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the topology is fixed."""

    def local_rank(self) -> int:
        """Return the rank of this process on the node."""
        return self._topology.local_rank

    def node_rank(self) -> int:
        """Return the rank of the node."""
        return self._topology.cross_rank
