"""Data-parallel training with Lightning's launchers and process groups, every wrapped model on its own."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning.strategies import StrategyRegistry

from det_lightning.adapters.strategies.per_model import PerModelStrategy
from det_lightning.distributed.backend import Backend
from det_lightning.distributed.ddp import DDPBackend

#: The name of the strategy with its option, as Lightning's names have it.
FIND_UNUSED = "trial_ddp_find_unused_parameters_true"


class PerModelDDPStrategy(PerModelStrategy):
    """``pl.Trainer(strategy="trial_ddp", devices=n)``: Lightning's DDP, but with one DDP module for each wrapped model.

    So several models, optimizers and backward passes, in any order, need no search for unused parameters, and
    gradients are exchanged only on batches that update.

    Args:
        find_unused_parameters: look, in each forward pass, for parameters that get no gradient; for models that do not
            use all of theirs in every batch. ``strategy="trial_ddp_find_unused_parameters_true"`` does the same.
        **kwargs: those of ``DDPStrategy`` about processes: ``process_group_backend``, ``timeout``, ``start_method``,
            ``cluster_environment``.
    """

    strategy_name = "trial_ddp"

    def __init__(self, find_unused_parameters: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._find_unused_parameters = find_unused_parameters

    def make_backend(self, device: torch.device) -> Backend:
        return DDPBackend(device, self._find_unused_parameters)


StrategyRegistry.register(
    PerModelDDPStrategy.strategy_name,
    PerModelDDPStrategy,
    description="a trial's models replicated over devices, each as a DDP module of its own",
    override=True,
)
StrategyRegistry.register(
    FIND_UNUSED,
    PerModelDDPStrategy,
    description="the same, for models that leave out parameters in some batches",
    override=True,
    find_unused_parameters=True,
)
