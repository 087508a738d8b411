"""What the strategies for trials on several processes share: Lightning's launchers, process groups and collectives."""

from __future__ import annotations

import socket
from typing import Any

import torch
from pytorch_lightning.strategies import DDPStrategy

from det_lightning.core.distributed import DistributedContext
from det_lightning.pytorch.backend import Backend

__all__ = ["PerModelStrategy", "free_port"]


class PerModelStrategy(DDPStrategy):
    """Lightning's DDP without its module: the trial's models are made ready for training one by one.

    Args:
        **kwargs: those of ``DDPStrategy`` about processes: ``process_group_backend``, ``timeout``, ``start_method``,
            ``cluster_environment``.
    """

    strategy_name: str

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def configure_ddp(self) -> None:
        """Leave the module as it is: the trial's models are wrapped one by one."""

    def on_exception(self, exception: BaseException) -> None:
        """Leave messages as they are: Lightning's hint names settings that a trial does not have."""

    def make_backend(self, device: torch.device) -> Backend:
        """Return what a trial's context trains on."""
        raise NotImplementedError

    def make_distributed(self) -> DistributedContext:
        """Return the place of this process among all."""
        environment = self.cluster_environment
        assert environment is not None
        return DistributedContext(
            rank=self.global_rank,
            size=self.world_size,
            local_rank=self.local_rank,
            local_size=self.num_processes,
            cross_rank=self.node_rank,
            cross_size=self.num_nodes,
            chief_ip=environment.main_address,
            pub_port=self.broadcast(free_port()),
        )


def free_port() -> int:
    """Return a TCP port of this machine that nothing listens on."""
    with socket.socket() as found:
        found.bind(("", 0))
        port: int = found.getsockname()[1]
    return port
