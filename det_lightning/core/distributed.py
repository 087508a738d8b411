"""Where this process stands among the processes of a run, and how they exchange objects."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["DistributedContext"]


class DistributedContext:
    """Rank and size of a run, and gathering and broadcasting of Python objects over its processes.

    Args:
        rank: index of this process among all, 0 being the chief.
        size: number of all processes.
        local_rank: index of this process on its node.
        local_size: number of processes on its node.
        cross_rank: index of its node.
        cross_size: number of nodes.
        chief_ip: where the chief is reached from other nodes; not used by a single process.

    Raises:
        ValueError: ``size`` is above 1; this version runs in a single process.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        local_size: int = 1,
        cross_rank: int = 0,
        cross_size: int = 1,
        chief_ip: str | None = None,
    ) -> None:
        if size != 1:
            raise ValueError(
                f"DistributedContext(size={size}): this version of det_lightning trains in a single process. "
                "Start the script without a launcher, or give init() no distributed= argument."
            )
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.cross_rank = cross_rank
        self.cross_size = cross_size

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None) -> DistributedContext:
        """Read the place of this process from the environment that ``torchrun`` makes.

        Raises:
            ValueError: this process was not started by ``torchrun``; names what is missing. Or see the class.
        """
        names = {
            "rank": "RANK",
            "size": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "local_size": "LOCAL_WORLD_SIZE",
            "cross_rank": "GROUP_RANK",
            "cross_size": "GROUP_WORLD_SIZE",
        }
        missing = [name for name in names.values() if name not in os.environ]
        if missing:
            raise ValueError(
                f"from_torch_distributed() needs torchrun; {', '.join(missing)} are not in the environment."
            )
        return cls(**{field: int(os.environ[name]) for field, name in names.items()}, chief_ip=chief_ip)

    def get_rank(self) -> int:
        """Return the index of this process among all."""
        return self.rank

    def get_local_rank(self) -> int:
        """Return the index of this process on its node."""
        return self.local_rank

    def get_size(self) -> int:
        """Return the number of processes."""
        return self.size

    def get_num_agents(self) -> int:
        """Return the number of nodes."""
        return self.cross_size

    def gather(self, stuff: Any) -> list[Any] | None:
        """Return the objects of all ranks, in the order of the ranks, on the chief; None elsewhere."""
        return [stuff]

    def gather_local(self, stuff: Any) -> list[Any] | None:
        """Like :meth:`gather`, among the processes of this node."""
        return [stuff]

    def allgather(self, stuff: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of the ranks, on every rank."""
        return [stuff]

    def allgather_local(self, stuff: Any) -> list[Any]:
        """Like :meth:`allgather`, among the processes of this node."""
        return [stuff]

    def broadcast(self, stuff: Any) -> Any:
        """Return the chief's object on every rank."""
        return stuff

    def broadcast_local(self, stuff: Any = None) -> Any:
        """Return the object of local rank 0 on every rank of its node."""
        return stuff

    def close(self) -> None:
        """Release what the exchange holds."""
