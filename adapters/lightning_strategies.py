"""What is used of Lightning's strategies and launchers beyond documented API, with a contract test for each reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy, ParallelStrategy, Strategy
from pytorch_lightning.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

# Launchers


class _CheckingLauncher:
    """Lets the module check its trainer before other processes are started."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        check = getattr(getattr(trainer, "lightning_module", None), "check_before_launch", None)
        if check is not None:
            check(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)  # type: ignore[misc]


class CheckingScriptLauncher(_CheckingLauncher, _SubprocessScriptLauncher):
    """Lightning's launcher that runs the script again."""


class CheckingProcessLauncher(_CheckingLauncher, _MultiProcessingLauncher):
    """Lightning's launcher that forks or spawns processes."""


def check_before_launch(strategy: ParallelStrategy) -> None:
    """Make ``check_before_launch(trainer)`` of the module be called before the processes of a strategy are started."""
    launcher = strategy.launcher
    environment = strategy.cluster_environment
    if type(launcher) is _MultiProcessingLauncher:
        strategy._launcher = CheckingProcessLauncher(strategy, start_method=launcher._start_method)
    elif type(launcher) is _SubprocessScriptLauncher and environment is not None:
        strategy._launcher = CheckingScriptLauncher(environment, launcher.num_processes, launcher.num_nodes)


# Strategies


def process_arguments(strategy: Strategy) -> dict[str, Any]:
    """Return the arguments of a strategy of Lightning about its processes, for another one."""
    given: Any = strategy
    names = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
    arguments = {name: getattr(given, f"_{name}", None) or getattr(given, name, None) for name in names}
    arguments["process_group_backend"] = given._process_group_backend
    arguments["timeout"] = given._timeout
    if isinstance(strategy, DDPStrategy):
        arguments["start_method"] = strategy._start_method
    return arguments


def ddp_options(strategy: DDPStrategy) -> tuple[dict[str, Any], list[str]]:
    """Return how a strategy replicates models, as arguments, and the names of options beyond that."""
    options = {
        **strategy._ddp_kwargs,
        "ddp_comm_hook": strategy._ddp_comm_hook,
        "ddp_comm_state": strategy._ddp_comm_state,
        "ddp_comm_wrapper": strategy._ddp_comm_wrapper,
    }
    return options, [] if strategy._model_averaging_period is None else ["model_averaging_period"]


def fsdp_options(strategy: FSDPStrategy) -> tuple[dict[str, Any], list[str]]:
    """Return how a strategy shards models, as arguments, and the names of options beyond that."""
    kwargs = {name: value for name, value in strategy.kwargs.items() if name != "use_orig_params"}
    policy = kwargs.pop("auto_wrap_policy", None)
    options: dict[str, Any] = {}
    if isinstance(policy, ModuleWrapPolicy):
        options["policy"] = list(policy._module_classes)
    used = {
        "auto_wrap_policy": policy is not None and not options,
        "cpu_offload": bool(strategy.cpu_offload and strategy.cpu_offload.offload_params),
        "mixed_precision": strategy.mixed_precision is not None,
        "activation_checkpointing": bool(strategy._activation_checkpointing_kwargs),
        "sharding_strategy": strategy.sharding_strategy is not ShardingStrategy.FULL_SHARD,
        "state_dict_type": strategy._state_dict_type != "full",
    }
    return options, [*(name for name, is_used in used.items() if is_used), *kwargs]


def replace_strategy(trainer: pl.Trainer, strategy: ParallelStrategy) -> None:
    """Make a trainer use another strategy, in the processes that were started for the present one."""
    given: Any = trainer.strategy
    module = trainer.lightning_module
    new: Any = strategy
    new._layer_sync = given._layer_sync
    new._launcher = given._launcher
    new.num_nodes = given.num_nodes
    new.set_world_ranks()
    trainer._accelerator_connector.strategy = strategy
    strategy.connect(module)
