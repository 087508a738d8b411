"""Data-parallel training with Lightning's launchers and process groups, every wrapped model on its own."""

from __future__ import annotations

import socket
from typing import Any

from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from det_lightning.adapters.strategies.model_ddp import DDPBackend
from det_lightning.core.distributed import DistributedContext
from det_lightning.pytorch.backend import Backend

__all__ = ["PerModelDDPStrategy"]


class PerModelDDPStrategy(DDPStrategy):
    """``pl.Trainer(strategy="trial_ddp", devices=n)``: Lightning's DDP, but with one DDP module for each wrapped model.

    So several models, optimizers and backward passes, in any order, need no search for unused parameters, and
    gradients are exchanged only on batches that update.

    Args:
        **kwargs: those of ``DDPStrategy`` about processes: ``process_group_backend``, ``timeout``, ``start_method``,
            ``cluster_environment``.
    """

    strategy_name = "trial_ddp"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def configure_ddp(self) -> None:
        """Leave the module as it is: the trial's models are wrapped one by one."""

    def on_exception(self, exception: BaseException) -> None:
        """Leave messages as they are: Lightning's hint names settings that a trial does not have."""

    def make_backend(self) -> Backend:
        """Return what a trial's context trains on."""
        return DDPBackend(self.root_device)

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
            pub_port=self.broadcast(_free_port()),
        )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        port: int = found.getsockname()[1]
    return port


StrategyRegistry.register(
    PerModelDDPStrategy.strategy_name,
    PerModelDDPStrategy,
    description="a trial's models replicated over devices, each as a DDP module of its own",
    override=True,
)
