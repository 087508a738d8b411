"""Strategies that wrap each model of a trial, with DDP or FSDP; Lightning's view of processes started elsewhere."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from det_lightning import errors
from det_lightning.adapters import lightning_internals
from det_lightning.adapters.lightning_package import ClusterEnvironment, TrainerFn, pl
from det_lightning.distributed.backend import Backend
from det_lightning.distributed.ddp import DDPBackend
from det_lightning.distributed.fsdp import FSDPBackend, Policy
from det_lightning.distributed.sharded_states import gather_optimizer, gather_tensors, load_into_optimizer
from det_lightning.ranks.distributed_context import DistributedContext
from det_lightning.ranks.topology import ProcessTopology, free_port


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
        return False

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


class StaysOnDevice(pl.strategies.Strategy):
    """Leaves models and optimizers on the device after a run, where Lightning would move them to the CPU."""

    def teardown(self) -> None:
        """End a run."""
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class OneDeviceStrategy(pl.strategies.SingleDeviceStrategy, StaysOnDevice):
    """Lightning's strategy for one process."""


class PerModelStrategy(pl.strategies.DDPStrategy, StaysOnDevice):
    """Lightning's DDP without the DDP module: the trial's models are prepared for training one by one.

    The arguments are those of ``DDPStrategy`` about processes. Raise a TypeError for any other argument.
    """

    strategy_name: str

    # Named one by one, because LightningCLI passes every argument that it finds.
    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: pl.plugins.CheckpointIO | None = None,
        precision_plugin: pl.plugins.Precision | None = None,
        process_group_backend: str | None = None,
        timeout: datetime.timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **others: Any,
    ) -> None:
        if others:
            raise TypeError(
                f"{type(self).__name__} does not take {', '.join(sorted(others))}, but its own options and the options "
                "of DDPStrategy about processes, such as process_group_backend, start_method and timeout."
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._starts_by = start_method

    def _configure_launcher(self) -> None:
        self._launcher = lightning_internals.make_launcher(self, self._starts_by)

    def configure_ddp(self) -> None:
        """Leave the module alone: the trial's models are wrapped one by one."""
        self.require_trial()

    def require_trial(self) -> None:
        """Raise an UnsupportedTrainerFlags if the module has no trial: its gradients would not be all-reduced."""
        module = self.lightning_module
        if self.world_size > 1 and getattr(module, "context", None) is None:
            raise errors.UnsupportedTrainerFlags(
                f"strategy={self.strategy_name!r} trains the models of a TrialModule; each rank would train the models "
                f"of {type(module).__name__} alone. Use another pl.Trainer, with Lightning's own strategy."
            )

    def on_exception(self, exception: BaseException) -> None:
        """Do nothing: Lightning's hint would name settings that a trial does not have."""

    def make_backend(self, device: torch.device) -> Backend:
        """Return the backend for the trial's models on a device."""
        raise NotImplementedError

    def make_distributed(self) -> DistributedContext:
        """Return the processes launched by Lightning, connected for exchanging objects."""
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


#: The name of the strategy with the option, in the style of Lightning's names.
FIND_UNUSED = "trial_ddp_find_unused_parameters_true"

_OF_MODELS = {"broadcast_buffers", "bucket_cap_mb", "gradient_as_bucket_view", "static_graph"}


class PerModelDDPStrategy(PerModelStrategy):
    """``pl.Trainer(strategy="trial_ddp", devices=n)``: Lightning's DDP, with a DDP module for each wrapped model.

    Several models, optimizers and backward passes, in any order, need no search for unused parameters, and gradients
    are all-reduced only on batches that update.

    Args:
        find_unused_parameters: look for parameters without a gradient in each forward pass, for models with parameters
            that some batches leave out. ``strategy="trial_ddp_find_unused_parameters_true"`` does the same.
        broadcast_buffers, bucket_cap_mb, gradient_as_bucket_view, static_graph: passed to the
            ``DistributedDataParallel`` of each model, with the same defaults.
        **kwargs: arguments of ``DDPStrategy`` about processes: ``process_group_backend``, ``timeout``,
            ``start_method``, ``cluster_environment``.

    Example:
        >>> import pytorch_lightning as pl
        >>> from det_lightning.adapters.strategies import PerModelDDPStrategy
        >>> strategy = PerModelDDPStrategy(find_unused_parameters=True)

        Pass it in ``pl.Trainer(strategy=strategy, devices=2)``.
    """

    strategy_name = "trial_ddp"

    def __init__(self, find_unused_parameters: bool = False, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in _OF_MODELS & kwargs.keys()}
        super().__init__(**kwargs)
        self._arguments = {"find_unused_parameters": find_unused_parameters, **given}

    def make_backend(self, device: torch.device) -> Backend:
        """Return a backend with DDP for each model."""
        return DDPBackend(device, **self._arguments)


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
        mixed_precision: the types in which FSDP2 gathers parameters and reduces gradients. They default to the types of
            the parameters.
        sharded_checkpoints: let each rank write its shards into the checkpoints of ``DeterminedCheckpoint``, without
            gathering. ``det-lightning checkpoint merge`` makes Determined's files from the shards.
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
