"""The bases of the strategies for trials, and Lightning's view of processes started elsewhere."""

from __future__ import annotations

import datetime
import os
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from det_lightning import errors
from det_lightning.adapters import lightning_internals
from det_lightning.adapters.lightning_package import ClusterEnvironment, pl
from det_lightning.distributed.backend import Backend
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
    """Leaves models and optimizers on the device at the end of a run; Lightning would move them to the CPU."""

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

    def setup_environment(self) -> None:
        """Connect the processes; raise a ValueError if torch or the device lacks ``process_group_backend``."""
        backend = self.process_group_backend
        names = [entry.rpartition(":")[2] for entry in (backend or "").split(",")]  # "gloo", "cpu:gloo,cuda:nccl"
        needs_gpu = backend == "nccl" and self.root_device.type != "cuda"
        if backend is not None and (needs_gpu or not all(map(dist.is_backend_available, names))):
            raise ValueError(
                f"process_group_backend={backend!r} cannot connect processes on {self.root_device} with torch "
                f"{torch.__version__}. Leave it out, or use 'gloo'; 'nccl' needs GPUs and a build of torch for CUDA "
                "(pip install torch, without the constraint to a CPU build)."
            )
        super().setup_environment()

    def _configure_launcher(self) -> None:
        self._launcher = lightning_internals.make_launcher(self, self._starts_by)

    def configure_ddp(self) -> None:
        """Leave the module alone: the trial's models are wrapped one by one."""
        self.require_trial()

    def require_trial(self) -> None:
        """Raise an UnsupportedTrainerFlags if the module has no trial: no rank would exchange gradients."""
        module = self.lightning_module
        if self.world_size > 1 and getattr(module, "context", None) is None:
            raise errors.UnsupportedTrainerFlags(
                f"strategy={self.strategy_name!r} trains the models of a TrialModule; each rank would train the models "
                f"of {type(module).__name__} alone. Use another pl.Trainer, with Lightning's own strategy."
            )

    def on_exception(self, exception: BaseException) -> None:
        """Keep quiet: Lightning's hint names settings foreign to a trial."""

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
