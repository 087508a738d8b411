"""Data-parallel training with Lightning's launchers and process groups, wrapping each model separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from det_lightning.adapters.lightning_package import pl
from det_lightning.adapters.strategies.per_model import PerModelStrategy
from det_lightning.distributed.backend import Backend
from det_lightning.distributed.ddp import DDPBackend, DDPOptions

#: The name of the strategy with the option, in the style of Lightning's names.
FIND_UNUSED = "trial_ddp_find_unused_parameters_true"

_OF_MODELS = {"broadcast_buffers", "bucket_cap_mb", "gradient_as_bucket_view", "static_graph"}


class PerModelDDPStrategy(PerModelStrategy):
    """``pl.Trainer(strategy="trial_ddp", devices=n)``: Lightning's DDP, with a DDP module for each wrapped model.

    Several models, optimizers and backward passes, in any order, need no search for unused parameters, and ranks
    exchange gradients only on batches that update.

    Args:
        find_unused_parameters: look for parameters without a gradient in each forward pass, for models with parameters
            that some batches leave out. ``strategy="trial_ddp_find_unused_parameters_true"`` does the same.
        broadcast_buffers, bucket_cap_mb, gradient_as_bucket_view, static_graph: passed to the
            ``DistributedDataParallel`` of each model, with the same defaults.
        ddp_comm_hook: exchanges the gradients of a bucket of each model, as in ``DistributedDataParallel``.
        ddp_comm_state: the state of the hook, for the first model; every other model gets a copy.
        ddp_comm_wrapper: wraps the hook in another hook.
        **kwargs: arguments of ``DDPStrategy`` about processes: ``process_group_backend``, ``timeout``,
            ``start_method``, ``cluster_environment``.

    Example:
        >>> import pytorch_lightning as pl
        >>> from det_lightning.adapters.strategies import PerModelDDPStrategy
        >>> strategy = PerModelDDPStrategy(find_unused_parameters=True)

        Pass it in ``pl.Trainer(strategy=strategy, devices=2)``.
    """

    strategy_name = "trial_ddp"

    def __init__(
        self,
        find_unused_parameters: bool = False,
        *,
        ddp_comm_hook: Callable[[Any, Any], Any] | None = None,
        ddp_comm_state: Any = None,
        ddp_comm_wrapper: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = {name: kwargs.pop(name) for name in _OF_MODELS & kwargs.keys()}
        super().__init__(**kwargs)
        hook = ddp_comm_hook
        if hook is not None and ddp_comm_wrapper is not None:
            hook = ddp_comm_wrapper(hook)
        arguments = {"find_unused_parameters": find_unused_parameters, **given}
        self._options = DDPOptions(arguments, hook, ddp_comm_state)

    def make_backend(self, device: torch.device) -> Backend:
        """Return a backend with DDP for each model."""
        return DDPBackend(device, self._options)


pl.strategies.StrategyRegistry.register(
    PerModelDDPStrategy.strategy_name,
    PerModelDDPStrategy,
    description="a trial's models replicated over devices, each as a DDP module of its own",
    override=True,
)
pl.strategies.StrategyRegistry.register(
    FIND_UNUSED,
    PerModelDDPStrategy,
    description="the same, for models that leave out parameters in some batches",
    override=True,
    find_unused_parameters=True,
)
