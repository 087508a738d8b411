"""Sharded training with Lightning's launchers and process groups, sharding each model separately."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from det_lightning import errors
from det_lightning.adapters import lightning_internals
from det_lightning.adapters.lightning_package import TrainerFn, pl
from det_lightning.adapters.strategies.per_model import PerModelStrategy
from det_lightning.distributed.backend import Backend
from det_lightning.distributed.fsdp import FSDPBackend, Policy
from det_lightning.distributed.sharded_states import gather_optimizer, gather_tensors, load_into_optimizer


class PerModelFSDPStrategy(PerModelStrategy):
    """``pl.Trainer(strategy="trial_fsdp", devices=n)``: each wrapped model's parameters are sharded over the ranks.

    FSDP2 shards models in place; create each optimizer after ``wrap_model``. A model's parameters are whole only during
    ``forward`` and backward passes, so all ranks must run a model equally often; for methods other than ``forward``
    there is ``torch.distributed.fsdp.register_fsdp_forward_method``. If some ranks get more validation batches than
    others, the models are whole on every rank during validations.

    Without ``sharded_checkpoints``, checkpoints hold whole tensors, gathered on the chief, as with any other strategy.

    Args:
        policy: modules to gather as units: classes, or a function of a module that returns a bool. By default a model
            is one unit.
        mixed_precision: the types in which FSDP2 gathers parameters and reduces gradients. Default to the types of the
            parameters.
        sharded_checkpoints: let each rank write the rank's shards into the checkpoints of ``DeterminedCheckpoint``,
            without gathering. ``det-lightning checkpoint merge`` makes Determined's files from the shards.
        **kwargs: arguments of ``DDPStrategy`` about processes: ``process_group_backend``, ``timeout``,
            ``start_method``, ``cluster_environment``.

    Raises:
        UnsupportedTrainerFlags: torch is older than 2.13.

    Example:
        >>> import torch
        >>> from det_lightning.adapters.strategies import PerModelFSDPStrategy
        >>> strategy = PerModelFSDPStrategy(policy=[torch.nn.TransformerEncoderLayer])

        Pass it in ``pl.Trainer(strategy=strategy, devices=8)``, or to ``det.pytorch.init``.
    """

    strategy_name = "trial_fsdp"

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        mixed_precision: MixedPrecisionPolicy | None = None,
        sharded_checkpoints: bool = False,
        **kwargs: Any,
    ) -> None:
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise errors.UnsupportedTrainerFlags(
                f"strategy='trial_fsdp' needs torch 2.13 or later; this is torch {torch.__version__}, which trains "
                "wrong weights where a step leaves some parameters out. Install a later torch, or use "
                "strategy='trial_ddp'."
            )
        super().__init__(**kwargs)
        self._policy = policy
        self._options: dict[str, Any] = {"mixed_precision": mixed_precision, "sharded_checkpoints": sharded_checkpoints}

    def make_backend(self, device: torch.device) -> Backend:
        """Return a backend with FSDP2 for each model."""
        return FSDPBackend(device, self._policy, **self._options)

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepare a run; raise an UnsupportedTrainerFlags for ``sync_batchnorm``: modules are already sharded."""
        if lightning_internals.converts_batch_norms(self):
            raise errors.UnsupportedTrainerFlags(
                "pl.Trainer cannot train a trial with sync_batchnorm=True and strategy='trial_fsdp': call "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before wrap_model()."
            )
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model_to_device()
        if trainer.state.fn is TrainerFn.FITTING:
            self.require_trial()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return whole weights on the chief, and nothing elsewhere."""
        assert self.lightning_module is not None
        return gather_tensors(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer on the chief, and nothing elsewhere."""
        return gather_optimizer(lightning_internals.unwrap_optimizer(optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states from a file of Lightning."""
        # A checkpoint in Determined's format has no states here: the trial's run loads them.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_into_optimizer(optimizer, state)


pl.strategies.StrategyRegistry.register(
    PerModelFSDPStrategy.strategy_name,
    PerModelFSDPStrategy,
    description="a trial's models sharded over devices, each by FSDP2 on its own",
    override=True,
)
