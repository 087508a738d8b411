"""Uses of Lightning's strategies and launchers beyond documented API, with a contract test for each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from det_lightning.adapters.lightning_package import pl

# Launchers


class _CheckingLauncher:
    """Lets the module check the trainer before other processes start."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Check the trainer, then start processes."""
        check = getattr(getattr(trainer, "lightning_module", None), "check_before_launch", None)
        if check is not None:
            check(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)  # type: ignore[misc]


class CheckingScriptLauncher(_CheckingLauncher, pl.strategies.launchers._SubprocessScriptLauncher):
    """Lightning's launcher for running the script again."""


class CheckingProcessLauncher(_CheckingLauncher, pl.strategies.launchers._MultiProcessingLauncher):
    """Lightning's launcher for forking or spawning processes."""


def make_launcher(
    strategy: pl.strategies.DDPStrategy, start_method: Any
) -> CheckingProcessLauncher | CheckingScriptLauncher:
    """Return a launcher that calls the module's ``check_before_launch(trainer)`` first."""
    environment = strategy.cluster_environment
    if start_method != "popen":
        return CheckingProcessLauncher(strategy, start_method=start_method)
    assert environment is not None
    return CheckingScriptLauncher(environment, strategy.num_processes, strategy.num_nodes)


# Strategies


def read_ddp_options(strategy: pl.strategies.DDPStrategy) -> tuple[dict[str, Any], list[str]]:
    """Return how a strategy replicates models, as arguments, and the names of other options in use."""
    hooks = {name: vars(strategy)[f"_{name}"] for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper")}
    options = {**strategy._ddp_kwargs, **hooks}
    return options, [] if strategy._model_averaging_period is None else ["model_averaging_period"]


def read_fsdp_options(strategy: pl.strategies.FSDPStrategy) -> tuple[dict[str, Any], list[str]]:
    """Return how a strategy shards models, as arguments, and the names of other options in use."""
    kwargs = {name: value for name, value in strategy.kwargs.items() if name != "use_orig_params"}
    policy = kwargs.pop("auto_wrap_policy", None)
    options: dict[str, Any] = {}
    if isinstance(policy, ModuleWrapPolicy):
        options["policy"] = functools.partial(policy, recurse=False)
    by_default = vars(pl.strategies.FSDPStrategy())
    own = by_default.keys() - vars(pl.strategies.DDPStrategy()).keys() - {"kwargs", "num_nodes"}
    used = sorted(name for name, value in vars(strategy).items() if name in own and value != by_default[name])
    names = [name.strip("_").removesuffix("_kwargs") for name in used]
    if policy is not None and not options:
        names.append("auto_wrap_policy")
    return options, [*names, *kwargs]


def replace_strategy(trainer: pl.Trainer, strategy: pl.strategies.DDPStrategy) -> None:
    """Give a trainer another strategy, in the processes started for the current strategy."""
    given: Any = trainer.strategy
    module = trainer.lightning_module
    # Attributes shared by all strategies for several processes: devices, launcher, process group, plugins.
    of_processes = vars(pl.strategies.DDPStrategy()).keys() & vars(pl.strategies.FSDPStrategy()).keys()
    vars(strategy).update({name: value for name, value in vars(given).items() if name in of_processes})
    strategy.num_nodes = given.num_nodes
    strategy.set_world_ranks()
    trainer._accelerator_connector.strategy = strategy
    strategy.connect(module)
