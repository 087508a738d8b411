"""Strategies of Lightning's that know a trial's models, under the names that ``pl.Trainer(strategy=...)`` takes."""

from __future__ import annotations

import torch.distributed as dist
from pytorch_lightning.strategies import Strategy

from det_lightning.adapters.strategies.ddp import FIND_UNUSED, PerModelDDPStrategy
from det_lightning.adapters.strategies.environment import ContextEnvironment
from det_lightning.adapters.strategies.fsdp import PerModelFSDPStrategy
from det_lightning.adapters.strategies.horovod import HorovodStrategy
from det_lightning.adapters.strategies.horovod_processes import (
    connect_horovod,
    horovod_context,
    horovod_is_wanted,
    refuse_horovod,
)
from det_lightning.adapters.strategies.model_horovod import HorovodBackend
from det_lightning.adapters.strategies.per_model import PerModelStrategy
from det_lightning.adapters.strategies.torch_processes import device_of, is_one_of_several, torchrun_context
from det_lightning.core.distributed import DistributedContext
from det_lightning.distributed.backend import Backend
from det_lightning.distributed.local import LocalBackend

__all__ = [
    "TRIAL_STRATEGIES",
    "HorovodStrategy",
    "PerModelDDPStrategy",
    "PerModelFSDPStrategy",
    "backend_for",
    "backend_of",
    "connected",
    "distributed_for",
    "strategy_of",
    "trains_many",
]

_PER_MODEL = (PerModelDDPStrategy, PerModelFSDPStrategy)
_STRATEGIES = (*_PER_MODEL, HorovodStrategy)
#: The names to choose from for several processes.
TRIAL_STRATEGIES = tuple(strategy.strategy_name for strategy in _STRATEGIES)


def connected(distributed: DistributedContext | None, strategy: str | Strategy) -> DistributedContext:
    """Return the processes of a run: those that were given, otherwise those of Horovod or torchrun if there are any.

    Raises:
        ImportError: Horovod is asked for, and not installed.
        ValueError: it is asked for together with something else; or a node has more processes than GPUs.
    """
    if distributed is not None:
        return distributed
    if _is_horovod(strategy):
        return horovod_context()
    return torchrun_context() if is_one_of_several() else DistributedContext()


def _is_horovod(strategy: str | Strategy) -> bool:
    """Tell whether a run trains with Horovod: as chosen, or where nothing was, as the environment says."""
    if isinstance(strategy, HorovodStrategy) or strategy == HorovodStrategy.strategy_name:
        return True
    if strategy == PerModelDDPStrategy.strategy_name:  # the one that nobody has to choose
        return horovod_is_wanted()
    refuse_horovod(strategy if isinstance(strategy, str) else type(strategy).__name__)
    return False


def backend_of(distributed: DistributedContext, strategy: str | Strategy) -> Backend:
    """Return what a context trains on in a run that its script has launched and connected itself.

    Raises:
        ValueError: there are several processes, and nothing that connects them; or no such strategy is known, or
            something else is asked for too.
        ImportError: Horovod is asked for, and not installed.
    """
    if _is_horovod(strategy):
        return _horovod_backend(distributed)
    chosen = _chosen(strategy)
    if distributed.size == 1:
        return LocalBackend()
    if not dist.is_initialized():
        raise ValueError(
            f"init(distributed=...) has {distributed.size} processes, and torch.distributed does not connect them. "
            "Call torch.distributed.init_process_group('gloo') (or 'nccl') before init()."
        )
    return chosen.make_backend(device_of(distributed.local_rank))


def _horovod_backend(distributed: DistributedContext) -> Backend:
    size = connect_horovod().size()
    if size != distributed.size:
        raise ValueError(
            f"init(distributed=...) has {distributed.size} process(es), and Horovod connects {size}. Leave it out, or "
            "pass DistributedContext.from_horovod(horovod.torch)."
        )
    return LocalBackend() if size == 1 else HorovodBackend(device_of(distributed.local_rank))


def _chosen(strategy: str | Strategy) -> PerModelStrategy:
    if isinstance(strategy, _PER_MODEL):
        return strategy
    if strategy == FIND_UNUSED:
        return PerModelDDPStrategy(find_unused_parameters=True)
    for known in _PER_MODEL:
        if strategy == known.strategy_name:
            return known()
    raise ValueError(f"strategy must be {' or '.join(map(repr, TRIAL_STRATEGIES))}; got {strategy!r}.")


def strategy_of(distributed: DistributedContext, backend: Backend) -> Strategy | str:
    """Return the strategy for a run that its script has launched and connected itself."""
    if distributed.size == 1:
        return "auto"
    if isinstance(backend, HorovodBackend):
        return HorovodStrategy()
    kind = PerModelFSDPStrategy if backend.states.is_sharded else PerModelDDPStrategy
    return kind(cluster_environment=ContextEnvironment(distributed))


def trains_many(strategy: Strategy) -> bool:
    """Tell whether a strategy trains trials on several processes."""
    return isinstance(strategy, _STRATEGIES)


def backend_for(strategy: Strategy) -> Backend:
    """Return what a trial's context trains on."""
    device = strategy.root_device
    return strategy.make_backend(device) if isinstance(strategy, _STRATEGIES) else LocalBackend(device)


def distributed_for(strategy: Strategy) -> DistributedContext:
    """Return where this process stands among those of ``strategy``.

    Raises:
        ValueError: the environment asks for Horovod, and it was not chosen.
    """
    if not isinstance(strategy, HorovodStrategy):
        refuse_horovod(getattr(strategy, "strategy_name", type(strategy).__name__))
    return strategy.make_distributed() if isinstance(strategy, _STRATEGIES) else DistributedContext()
