"""Data-parallel training with Horovod's launcher, collectives and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from det_lightning import errors
from det_lightning.adapters import lightning_internals
from det_lightning.adapters.lightning_package import pl
from det_lightning.adapters.strategies.per_model import ContextEnvironment, StaysOnDevice
from det_lightning.distributed.backend import Backend
from det_lightning.distributed.horovod import HorovodBackend
from det_lightning.distributed.processes import connect_horovod, connect_horovod_ranks
from det_lightning.ranks.distributed_context import DistributedContext
from det_lightning.ranks.topology import topology_from_horovod

_T = TypeVar("_T")
_Collective = Callable[[torch.Tensor], torch.Tensor]

_OPERATIONS = {"mean": "Average", "avg": "Average", "sum": "Sum", "min": "Min", "max": "Max", "product": "Product"}


class HorovodStrategy(pl.strategies.ParallelStrategy, StaysOnDevice):
    """``pl.Trainer(strategy="horovod")`` in a script started by ``horovodrun``: Horovod averages a trial's gradients.

    ``horovodrun`` sets the number of processes; the trainer's ``devices=`` has no effect. Learning rates stay as the
    trial sets them. Only a ``TrialModule`` can be trained.

    Args:
        **kwargs: arguments of ``ParallelStrategy``: ``accelerator``, ``checkpoint_io``, ``precision_plugin``.

    Raises:
        ImportError: Horovod is not installed.
        ValueError: another launcher started the processes.

    Example:
        >>> from pytorch_lightning.strategies import StrategyRegistry
        >>> from det_lightning.adapters.strategies import HorovodStrategy  # makes its name known to Lightning
        >>> HorovodStrategy.strategy_name in StrategyRegistry
        True

        In a script that ``horovodrun -np 2 python train.py`` starts, pass ``pl.Trainer(strategy="horovod")``.
    """

    strategy_name = "horovod"

    def __init__(self, **kwargs: Any) -> None:
        self._hvd = connect_horovod()
        super().__init__(**kwargs, cluster_environment=ContextEnvironment(topology_from_horovod(self._hvd)))

    # Processes and devices

    def set_world_ranks(self) -> None:
        """Set the rank that Lightning's messages use."""
        lightning_internals.set_printing_rank(self.global_rank)

    @property
    def is_distributed(self) -> bool:
        """True, so that Lightning gives each rank a share of the data."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The share of this rank, for a ``DistributedSampler``."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        devices = self.parallel_devices
        assert devices
        if self.local_rank < len(devices):
            return devices[self.local_rank]
        # devices= counts the devices of a single process, or was left out.
        return devices[0] if devices[0].type == "cpu" else torch.device(devices[0].type, self.local_rank)

    def model_to_device(self) -> None:
        """Move the module to the device of this process."""
        assert self.model is not None
        self.model.to(self.root_device)

    def make_backend(self, device: torch.device) -> Backend:
        """Return a backend with Horovod's optimizers."""
        return HorovodBackend(device)

    def make_distributed(self) -> DistributedContext:
        """Return the processes of ``horovodrun``, connected for exchanging objects."""
        return connect_horovod_ranks()

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepare a run; raise an UnsupportedTrainerFlags for ``sync_batchnorm`` or a module without a trial."""
        if lightning_internals.converts_batch_norms(self):
            raise errors.UnsupportedTrainerFlags(
                "pl.Trainer cannot train with sync_batchnorm=True and strategy='horovod'; use "
                "horovod.torch.SyncBatchNorm in the model."
            )
        super().setup(trainer)
        module = type(self.lightning_module).__name__
        if not all(hasattr(optimizer, "skip_synchronize") for optimizer in self.optimizers):
            raise errors.UnsupportedTrainerFlags(
                "strategy='horovod' trains a TrialModule, whose context wraps the optimizers; the optimizers of "
                f"{module} are not Horovod's, and each rank would train alone."
            )

    # Collectives. Each call gives a name: by default Horovod names an object by type, and ranks with different types
    # would wait for each other forever.

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            self._hvd.barrier()

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        """Return the object of the rank ``src`` on every rank."""
        if self.world_size == 1:
            return obj
        found: _T = self._hvd.broadcast_object(obj, src, name="det_lightning.broadcast")
        return found

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks. The mean of integers is a float; other objects are returned unchanged."""
        name = str(reduce_op).rpartition(".")[2].lower()
        if name not in _OPERATIONS:
            raise ValueError(f"reduce_op must be one of {', '.join(_OPERATIONS)} with Horovod; got {reduce_op!r}.")
        if not isinstance(tensor, torch.Tensor) or self.world_size == 1:
            return tensor
        operation = getattr(self._hvd, _OPERATIONS[name])
        return _exchange(
            lambda values: self._hvd.allreduce(values, name="det_lightning.reduce", op=operation),
            tensor,
            averages=operation == self._hvd.Average,
        )

    def all_gather(self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all ranks, of equal shape, along a new first dimension."""
        if self.world_size == 1:
            return tensor

        def gather(values: torch.Tensor) -> torch.Tensor:
            gathered: torch.Tensor = self._hvd.allgather(values.unsqueeze(0), name="det_lightning.all_gather")
            return gathered

        return gather(tensor) if sync_grads and tensor.requires_grad else _exchange(gather, tensor)


def _exchange(run: _Collective, tensor: torch.Tensor, averages: bool = False) -> torch.Tensor:
    """Run a collective on a tensor of any type, whichever torch mode Lightning has set."""
    as_float = tensor.dtype is torch.bfloat16  # unknown to Horovod
    if averages and not tensor.is_floating_point():
        tensor = tensor.double()  # Horovod would use integer division
    # Horovod works in place. Outside inference mode torch forbids that for tensors created inside.
    with torch.inference_mode(False), torch.no_grad():
        own = tensor.detach().clone(memory_format=torch.contiguous_format)
        return run(own.float()).bfloat16() if as_float else run(own)


pl.strategies.StrategyRegistry.register(
    HorovodStrategy.strategy_name,
    HorovodStrategy,
    description="a trial's gradients over Horovod, in the processes of horovodrun",
    override=True,
)
