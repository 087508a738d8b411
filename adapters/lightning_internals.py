"""Uses of undocumented names of Lightning: trainers, hooks, metrics, strategies. Loops are in ``lightning_loops``.

If a new release of Lightning moves a name, tests in ``tests/adapters`` fail.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core import rank_zero
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from det_lightning.adapters.lightning_package import LightningEnvironment, TrainerFn, pl
from det_lightning.checkpoint.format.content import TrialState

# Lightning warns of wrong batch indices in hooks with this form of a step; see show_batch_index.
warnings.filterwarnings("ignore", message=r".*dataloader_iter.*")
# Lightning 2.6 on torch 2.13 warns in every run; users can do nothing.
warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
# The values in TrialModule's log are already reduced over all ranks.
warnings.filterwarnings("ignore", message=r".*sync_dist=True.*")
# Printed when a trainer is created, and wrong for a trial with a max_length; for other trials flags.py warns.
warnings.filterwarnings("ignore", message=r".*max_epochs. was not set. Setting it to 1000 epochs.*")
# A trial resumes from the state after the update, and the checkpoint holds this state.
warnings.filterwarnings("ignore", message=r"Using ModelCheckpoint with manual optimization.*")

#: A classmethod without calls on an instance.
if TYPE_CHECKING:
    restricted_classmethod = classmethod
else:
    restricted_classmethod = type(vars(pl.LightningModule)["load_from_checkpoint"])

# A module with automatic optimization, Lightning's default.
_AUTOMATIC = pl.LightningModule()

# Loops


def validates_at_stop(trainer: pl.Trainer) -> bool:
    """Return whether a callback has set ``should_stop``, and Lightning validates before the training ends."""
    can_stop = trainer.current_epoch >= (trainer.min_epochs or 0) and trainer.global_step >= (trainer.min_steps or 0)
    every = trainer.check_val_every_n_epoch or 1  # None counts batches over the ends of epochs
    validates = trainer.enable_validation and (trainer.current_epoch + 1) % every == 0
    return trainer.should_stop and can_stop and validates


def announce_no_validations(trainer: pl.Trainer) -> None:
    """Tell callbacks that epochs end without a validation, so that a ``ModelCheckpoint`` saves after validations."""
    trainer.check_val_every_n_epoch = sys.maxsize


def validates_by_time(trainer: pl.Trainer) -> bool:
    """Return whether the ``val_check_interval`` of a trainer is a time."""
    return vars(trainer).get("_val_check_time_interval") is not None  # from Lightning 2.6 on


def run_validation(trainer: pl.Trainer) -> None:
    """Run Lightning's validation loop outside of a training step."""
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True


def end_epoch(dataloader_iter: Any) -> None:
    """Make the current step the last step of the epoch, or of the validation."""
    dataloader_iter.data_fetcher.done = True


def limit_epochs(trainer: pl.Trainer, epochs: int) -> None:
    """Train for at most ``epochs``, shown on progress bars; -1 means until :func:`end_training`."""
    trainer.fit_loop.max_epochs = epochs


def end_training(trainer: pl.Trainer, early: bool) -> None:
    """End the training after the current step; if ``early``, even before ``min_epochs`` or ``min_steps``."""
    trainer.should_stop = True
    if early:
        trainer.fit_loop.min_epochs = None
        trainer.fit_loop.epoch_loop.min_steps = None


def move_to(trainer: pl.Trainer, state: TrialState, optimizer_steps: int, extra_batches: int = 0) -> None:
    """Make Lightning's counters agree with the trial's: add a step's ``extra_batches`` that Lightning did not count."""
    epoch_loop = trainer.fit_loop.epoch_loop
    show_optimizer_steps(trainer, optimizer_steps)
    if extra_batches > 0:
        progress: Any = epoch_loop.batch_progress  # Lightning 2.4 has no method for this
        for counts in (progress.total, progress.current):
            counts.ready += extra_batches
            counts.started += extra_batches
            counts.processed += extra_batches
            counts.completed += extra_batches
        progress.is_last_batch = False
    show_logging_step(trainer, state.batches_trained)


def show_logging_step(trainer: pl.Trainer, step: int) -> None:
    """Set the step of logged values; Lightning adds 1 at the end of each step."""
    # The loop restores the step from a checkpoint in this way.
    trainer.fit_loop.epoch_loop.on_load_checkpoint({"_batches_that_stepped": step})


def show_optimizer_steps(trainer: pl.Trainer, optimizer_steps: int) -> None:
    """Make Lightning's ``global_step`` agree with the trial's number of optimizer steps."""
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
    progress.ready = optimizer_steps
    progress.completed = optimizer_steps


def move_to_epoch(trainer: pl.Trainer, epochs_trained: int) -> None:
    """Make ``trainer.current_epoch`` agree with a trial that resumes from a checkpoint."""
    current: Any = trainer.fit_loop.epoch_progress.current
    current.ready = current.started = current.processed = current.completed = epochs_trained


# The data of a call


def take_call_dataloaders(trainer: pl.Trainer) -> dict[str, Callable[[], Any]]:
    """Let Lightning ask the module for all data of ``fit`` or ``validate``; return functions for the data of the call.

    The key of a function is the name of the replaced method of the module.
    """
    fits = trainer.state.fn is TrainerFn.FITTING
    loops: list[Any] = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop] if fits else [trainer.validate_loop]
    given: dict[str, Callable[[], Any]] = {}
    for loop in loops:
        source = _get_data_source(loop)
        if source.instance is trainer.lightning_module:
            continue
        if not source.is_defined() or source.instance == []:
            given[source.name] = tuple  # Lightning validates on nothing then
            continue
        given[source.name] = copy.copy(source).dataloader
        source.instance = trainer.lightning_module
    return given


def find_datamodule(trainer: Any) -> pl.LightningDataModule | None:
    """Return the data module of a call, or None."""
    datamodule: pl.LightningDataModule | None = trainer.datamodule
    # A trainer remembers earlier data modules; Lightning attaches the data module of this call to all loops.
    return datamodule if _get_data_source(trainer.predict_loop).instance is datamodule else None


def has_data(trainer: pl.Trainer) -> bool:
    """Return whether there is data for ``test`` or ``predict``, from the call or from the module."""
    loop = trainer.test_loop if trainer.state.fn is TrainerFn.TESTING else trainer.predict_loop
    return bool(_get_data_source(loop).is_defined())


def _get_data_source(loop: Any) -> Any:
    return loop._data_source


# Hooks


def call_hook(trainer: pl.Trainer, hook: str, *args: Any) -> None:
    """Call a hook of all callbacks, then of the module, as Lightning does: profiled, and allowed to log."""
    pl.trainer.call._call_callback_hooks(trainer, hook, *args)
    call_module_hook(trainer, hook, *args)


def takes_dataloader_iter(step: Callable[..., Any]) -> bool:
    """Return whether Lightning gives a step the iterator over the data, not a batch."""
    return bool(pl.utilities.signature_utils.is_param_in_hook_signature(step, "dataloader_iter", explicit=True))


def call_module_hook(trainer: pl.Trainer, hook: str, *args: Any) -> None:
    """Call a hook of the module, as Lightning does."""
    pl.trainer.call._call_lightning_module_hook(trainer, hook, *args)


# Metrics and logging


def find_batch_size(module: pl.LightningModule, counts: bool) -> int | None:
    """Return the batch size for logging during training, where Lightning sees no batches of a step; otherwise None.

    If the size ``counts``, return the size of the batch shown to hooks, if any; otherwise 1.
    """
    try:
        trainer = module.trainer
    except RuntimeError:  # the module has none
        return None
    if not isinstance(trainer, pl.Trainer) or not trainer.training:
        return None
    shown = getattr(trainer.fit_loop.epoch_loop, "shown", None)  # of lightning_loops.TrialEpochLoop
    return 1 if shown is None or not counts else int(pl.utilities.data.extract_batch_size(shown))


def publish_metrics(trainer: pl.Trainer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Show metrics (0-d float64 tensors) to callbacks, without Lightning's result collection."""
    trainer.callback_metrics.update(tensors)


def show_report(trainer: pl.Trainer, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> None:
    """Show reported metrics to callbacks, as logged metrics, and on progress bars."""
    publish_metrics(trainer, tensors)
    trainer.logged_metrics.update(tensors)
    trainer.progress_bar_metrics.update(scalars)


def save_by_time(trainer: pl.Trainer) -> None:
    """Save by ``train_time_interval`` of a ``ModelCheckpoint``; Lightning 2.6 only saves in automatic optimization."""
    # If Lightning's flags announced a validation, a callback with a monitored metric would wait.
    users_flag = trainer.check_val_every_n_epoch
    announce_no_validations(trainer)
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, pl.callbacks.ModelCheckpoint) and callback._train_time_interval is not None:
            # The method of the class itself: an override in a subclass has already seen this step.
            pl.callbacks.ModelCheckpoint.on_train_batch_end(callback, trainer, _AUTOMATIC, None, None, 0)
    trainer.check_val_every_n_epoch = users_flag


def get_hint_logger() -> logging.Logger:
    """Return the logger of Lightning's hints, which the package of Lightning imported last sets."""
    hints: logging.Logger = vars(rank_zero)["log"]
    return hints


@contextlib.contextmanager
def quiet_hints() -> Iterator[None]:
    """Silence Lightning's hints about devices and products, for users who did not choose Lightning."""
    hints = get_hint_logger()
    level = hints.level
    hints.setLevel(logging.WARNING)
    try:
        yield
    finally:
        hints.setLevel(level)


# Processes


def set_printing_rank(rank: int) -> None:
    """Set the rank of this process in Lightning's ``rank_zero_only``."""
    rank_zero.rank_zero_only.rank = rank  # type: ignore[attr-defined]


def choose_exit_code(trainer: pl.Trainer, exit_code: int) -> int:
    """Return the exit code for this process: ``exit_code``, but 0 in a process that Lightning's launcher started.

    Lightning's launcher kills its calling process when a started process ends with an error.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return 0 if isinstance(environment, LightningEnvironment) and environment.local_rank() > 0 else exit_code


@contextlib.contextmanager
def reraise_keyboard_interrupt() -> Iterator[None]:
    """Raise the ``KeyboardInterrupt`` that Lightning turns into an exit, and handle the next Ctrl-C as before."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as e:
        interrupt = e.__context__
        if type(e) is not SystemExit or not isinstance(interrupt, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, handler)
        raise interrupt from None


# Strategies


def converts_batch_norms(strategy: pl.strategies.ParallelStrategy) -> bool:
    """Return whether ``sync_batchnorm=True`` makes a strategy replace modules."""
    return strategy._layer_sync is not None


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside Lightning's wrapper, or an unwrapped optimizer unchanged."""
    return optimizer.optimizer if isinstance(optimizer, pl.core.optimizer.LightningOptimizer) else optimizer


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
    others = ["ddp_comm_hook"] if strategy._ddp_comm_hook is not None else []
    others += [] if strategy._model_averaging_period is None else ["model_averaging_period"]
    return dict(strategy._ddp_kwargs), others


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
