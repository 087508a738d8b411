"""Data-parallel training with Lightning's launchers and process groups, every wrapped model on its own."""

from __future__ import annotations

import torch
from pytorch_lightning.strategies import StrategyRegistry

from det_lightning.adapters.strategies.model_ddp import DDPBackend
from det_lightning.adapters.strategies.per_model import PerModelStrategy
from det_lightning.pytorch.backend import Backend

__all__ = ["PerModelDDPStrategy"]


class PerModelDDPStrategy(PerModelStrategy):
    """``pl.Trainer(strategy="trial_ddp", devices=n)``: Lightning's DDP, but with one DDP module for each wrapped model.

    So several models, optimizers and backward passes, in any order, need no search for unused parameters, and
    gradients are exchanged only on batches that update.

    Args:
        **kwargs: those of ``DDPStrategy`` about processes: ``process_group_backend``, ``timeout``, ``start_method``,
            ``cluster_environment``.
    """

    strategy_name = "trial_ddp"

    def make_backend(self, device: torch.device) -> Backend:
        return DDPBackend(device)


StrategyRegistry.register(
    PerModelDDPStrategy.strategy_name,
    PerModelDDPStrategy,
    description="a trial's models replicated over devices, each as a DDP module of its own",
    override=True,
)
