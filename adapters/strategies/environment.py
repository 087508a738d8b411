"""The processes of a run that was launched and connected before Lightning came in."""

from __future__ import annotations

import os
from typing import Protocol

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment


class Place(Protocol):
    """Where a process stands, as a :class:`DistributedContext` knows it."""

    @property
    def rank(self) -> int:
        """Index of the process among all."""

    @property
    def size(self) -> int:
        """Number of all processes."""

    @property
    def local_rank(self) -> int:
        """Index of the process on its node."""

    @property
    def cross_rank(self) -> int:
        """Index of its node."""


class ContextEnvironment(ClusterEnvironment):
    """Tells Lightning where a process stands, so that it launches nothing itself.

    Args:
        distributed: the place of this process among all.
    """

    def __init__(self, distributed: Place) -> None:
        super().__init__()
        self._distributed = distributed

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
        return False  # it is passed to a strategy, never found

    def world_size(self) -> int:
        return self._distributed.size

    def set_world_size(self, size: int) -> None:
        """The context decides."""

    def global_rank(self) -> int:
        return self._distributed.rank

    def set_global_rank(self, rank: int) -> None:
        """The context decides."""

    def local_rank(self) -> int:
        return self._distributed.local_rank

    def node_rank(self) -> int:
        return self._distributed.cross_rank
