"""Decides how the processes of a run train: exchange of objects, backend, and Lightning's strategy by its name.

Change here: a strategy by name is an entry of ``TRIAL_STRATEGIES``. Its class registers the name in a module beside
this file, which ``adapters/strategies/__init__.py`` imports; a backend in ``det_lightning/distributed`` trains the
models.
"""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info

from det_lightning import errors
from det_lightning.adapters import lightning_internals
from det_lightning.adapters.lightning_package import pl
from det_lightning.adapters.strategies.horovod import HorovodStrategy
from det_lightning.adapters.strategies.per_model import (
    FIND_UNUSED,
    ContextEnvironment,
    OneDeviceStrategy,
    PerModelDDPStrategy,
    PerModelFSDPStrategy,
    PerModelStrategy,
)
from det_lightning.arguments import describe, require
from det_lightning.distributed.backend import Backend, LocalBackend
from det_lightning.distributed.horovod import HorovodBackend
from det_lightning.distributed.processes import (
    connect_horovod,
    connect_horovod_ranks,
    connect_torchrun_ranks,
    horovod_is_wanted,
    is_one_of_several,
    refuse_horovod,
    select_device,
)
from det_lightning.ranks.distributed_context import DistributedContext

_PER_MODEL = (PerModelDDPStrategy, PerModelFSDPStrategy)
#: The strategies for trials in several processes.
TRIAL_STRATEGIES = (*_PER_MODEL, HorovodStrategy)
#: Strategies of Lightning with a counterpart for trials.
REPLACED_STRATEGIES = (pl.strategies.DDPStrategy, pl.strategies.FSDPStrategy)


@dataclasses.dataclass(frozen=True)
class TrainingProcesses:
    """The processes of a run, and the backend for keeping models equal."""

    distributed: DistributedContext
    backend: Backend

    @classmethod
    def from_script(
        cls, distributed: DistributedContext | None, strategy: str | pl.strategies.Strategy | None = None
    ) -> TrainingProcesses:
        """Return the processes launched by a script, for arguments of ``init``."""
        is_context = distributed is None or isinstance(distributed, DistributedContext)
        advice = "For example DistributedContext.from_torch_distributed(), or leave distributed= out under torchrun."
        require(is_context, "init(distributed=...)", "a DistributedContext", distributed, advice)
        strategy = PerModelDDPStrategy.strategy_name if strategy is None else strategy
        if _is_horovod(strategy):
            return _use_horovod(distributed)
        chosen = _choose(strategy)
        if distributed is None:
            distributed = connect_torchrun_ranks() if is_one_of_several() else DistributedContext()
        if distributed.size == 1:
            return cls(distributed, LocalBackend())
        if not dist.is_initialized():
            raise ValueError(
                f"init(distributed=...) has {distributed.size} processes, and torch.distributed does not connect them. "
                "Call torch.distributed.init_process_group('gloo') (or 'nccl') before init()."
            )
        return cls(distributed, chosen.make_backend(select_device(distributed.local_rank)))

    @classmethod
    def from_trainer(cls, strategy: pl.strategies.Strategy) -> TrainingProcesses:
        """Return the processes of a ``pl.Trainer`` strategy; raise a ValueError if the environment asks for Horovod."""
        if not isinstance(strategy, HorovodStrategy):
            refuse_horovod(getattr(strategy, "strategy_name", type(strategy).__name__))
        device = strategy.root_device
        if isinstance(strategy, TRIAL_STRATEGIES):
            return cls(strategy.make_distributed(), strategy.make_backend(device))
        return cls(DistributedContext(), LocalBackend(device))

    def make_strategy(self) -> pl.strategies.Strategy:
        """Return a strategy for ``pl.Trainer`` that uses these processes and launches none."""
        if self.distributed.size == 1:
            return OneDeviceStrategy(self.backend.device)
        if isinstance(self.backend, HorovodBackend):
            return HorovodStrategy()
        kind = PerModelFSDPStrategy if self.backend.states.is_sharded else PerModelDDPStrategy
        return kind(cluster_environment=ContextEnvironment(self.distributed.topology))


def _use_horovod(distributed: DistributedContext | None) -> TrainingProcesses:
    distributed = connect_horovod_ranks() if distributed is None else distributed
    size = connect_horovod().size()
    if size != distributed.size:
        raise ValueError(
            f"init(distributed=...) has {distributed.size} process(es), and Horovod connects {size}. Leave out "
            "distributed=, or pass DistributedContext.from_horovod(horovod.torch)."
        )
    backend = LocalBackend() if size == 1 else HorovodBackend(select_device(distributed.local_rank))
    return TrainingProcesses(distributed, backend)


def _is_horovod(strategy: str | pl.strategies.Strategy) -> bool:
    """Return whether a run trains with Horovod, by choice or because of the environment."""
    if isinstance(strategy, HorovodStrategy) or strategy == HorovodStrategy.strategy_name:
        return True
    if strategy == PerModelDDPStrategy.strategy_name:  # the default
        return horovod_is_wanted()
    refuse_horovod(strategy if isinstance(strategy, str) else type(strategy).__name__)
    return False


def _choose(strategy: str | pl.strategies.Strategy) -> PerModelStrategy:
    if isinstance(strategy, _PER_MODEL):
        return strategy
    if strategy == FIND_UNUSED:
        return PerModelDDPStrategy(find_unused_parameters=True)
    for known in _PER_MODEL:
        if strategy == known.strategy_name:
            return known()
    names = " or ".join(repr(known.strategy_name) for known in TRIAL_STRATEGIES)
    raise ValueError(
        f"strategy must be {names}, or a strategy of det_lightning.adapters.strategies; got {describe(strategy)}."
    )


def use_trial_strategy(trainer: pl.Trainer) -> None:
    """Replace a trainer's ``"ddp"`` or ``"fsdp"`` by the strategy for trials, with its options and a notice."""
    given = trainer.strategy
    if isinstance(given, PerModelStrategy) or not isinstance(given, REPLACED_STRATEGIES):
        return
    taken = find_counterpart(given)
    rank_zero_info(
        f"{type(given).__name__} is replaced by strategy={taken.strategy_name!r}, which wraps each of the trial's "
        "models by itself."
    )
    lightning_internals.replace_strategy(trainer, taken)
    if isinstance(given, pl.strategies.FSDPStrategy):
        taken.precision_plugin = pl.plugins.Precision()


def find_counterpart(strategy: pl.strategies.DDPStrategy | pl.strategies.FSDPStrategy) -> PerModelStrategy:
    """Return the strategy for trials with the options of one of ``REPLACED_STRATEGIES``."""
    kind: type[PerModelStrategy] = PerModelDDPStrategy
    if isinstance(strategy, pl.strategies.FSDPStrategy):
        kind = PerModelFSDPStrategy
        options, others = lightning_internals.read_fsdp_options(strategy)
    else:
        options, others = lightning_internals.read_ddp_options(strategy)
    if not others:
        try:
            return kind(**options)
        except TypeError as e:
            others = [str(e)]
    raise errors.UnsupportedTrainerFlags(
        f"pl.Trainer cannot train a trial with these options of {type(strategy).__name__}: {'; '.join(others)}. "
        f"Leave them out, or use {kind.__name__} of det_lightning.adapters.strategies, with its own options."
    )
