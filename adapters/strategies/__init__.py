"""Strategies of Lightning's that know a trial's models, under the names that ``pl.Trainer(strategy=...)`` takes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from pytorch_lightning.strategies import Strategy

from det_lightning.adapters.strategies.ddp import PerModelDDPStrategy
from det_lightning.adapters.strategies.environment import ContextEnvironment
from det_lightning.adapters.strategies.model_ddp import DDPBackend
from det_lightning.core.distributed import DistributedContext
from det_lightning.pytorch.backend import Backend, LocalBackend

__all__ = [
    "TRIAL_STRATEGIES",
    "PerModelDDPStrategy",
    "backend_for",
    "backend_of",
    "distributed_for",
    "strategy_of",
    "trains_many",
]

_STRATEGIES = (PerModelDDPStrategy,)
#: The names to choose from for several processes.
TRIAL_STRATEGIES = tuple(strategy.strategy_name for strategy in _STRATEGIES)


def backend_of(distributed: DistributedContext) -> Backend:
    """Return what a context trains on in a run that its script has launched and connected itself.

    Raises:
        ValueError: there are several processes, and nothing that connects them.
    """
    if distributed.size == 1:
        return LocalBackend()
    if not dist.is_initialized():
        raise ValueError(
            f"init(distributed=...) has {distributed.size} processes, and torch.distributed does not connect them. "
            "Call torch.distributed.init_process_group('gloo') (or 'nccl') before init()."
        )
    return DDPBackend(_device_of(distributed.local_rank))


def strategy_of(distributed: DistributedContext) -> Strategy | str:
    """Return the strategy for a run that its script has launched and connected itself."""
    if distributed.size == 1:
        return "auto"
    return PerModelDDPStrategy(cluster_environment=ContextEnvironment(distributed))


def _device_of(local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if count == 0:
        return torch.device("cpu")
    if local_rank >= count:
        raise ValueError(
            f"There are more processes on this node than its {count} GPUs: no GPU for local rank {local_rank}."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def trains_many(strategy: Strategy) -> bool:
    """Tell whether a strategy trains trials on several processes."""
    return isinstance(strategy, _STRATEGIES)


def backend_for(strategy: Strategy) -> Backend:
    """Return what a trial's context trains on."""
    return strategy.make_backend() if isinstance(strategy, _STRATEGIES) else LocalBackend(strategy.root_device)


def distributed_for(strategy: Strategy) -> DistributedContext:
    """Return where this process stands among those of ``strategy``."""
    return strategy.make_distributed() if isinstance(strategy, _STRATEGIES) else DistributedContext()
