"""Decides which flags, callbacks and modules are refused beside a trial, and which flags the trial obeys itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from det_lightning import errors
from det_lightning.adapters import call_dataloaders, lightning_internals
from det_lightning.adapters.building import TRIAL_PRECISIONS, take_precision
from det_lightning.adapters.lightning_package import OTHER, PACKAGE, VARIABLE, TrainerFn, pl
from det_lightning.adapters.strategies.processes import REPLACED_STRATEGIES, TRIAL_STRATEGIES
from det_lightning.escaping import get_logger
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext

_AVERAGING = "wrap a torch.optim.swa_utils.AveragedModel in the trial"
_IN_ONE_PROCESS: dict[type[pl.Callback], str] = {}
if hasattr(pl.callbacks, "WeightAveraging"):  # from Lightning 2.6 on
    _IN_ONE_PROCESS[pl.callbacks.WeightAveraging] = f"it works in one process only; {_AVERAGING}"
    _AVERAGING = (
        "in one process use the callback WeightAveraging or EMAWeightAveraging, with a learning rate scheduler of the "
        f"trial; in several, {_AVERAGING}"
    )
# Callbacks for changing optimizers, steps or the batch size, all of them the trial's.
_UNSUPPORTED_CALLBACKS: dict[type[pl.Callback], str] = {
    pl.callbacks.BaseFinetuning: "freeze and unfreeze parameters in the on_training_epoch_start of a trial's callback",
    pl.callbacks.BatchSizeFinder: "set the batch size in hparams",
    pl.callbacks.GradientAccumulationScheduler: "use TrialModule(..., aggregation_frequency=...)",
    pl.callbacks.LearningRateFinder: "try learning rates as hyperparameters",
    pl.callbacks.ModelPruning: "prune with torch.nn.utils.prune in the trial, which knows the parameters of its models",
    pl.callbacks.StochasticWeightAveraging: _AVERAGING,
}


def refuse_unsupported_flags(trainer: pl.Trainer, aggregation: int | None = None, before_launch: bool = False) -> None:
    """Raise an UnsupportedTrainerFlags naming every flag that cannot work with a trial, and the way out.

    ``aggregation`` is the trial's ``aggregation_frequency``. The data of the call are unknown ``before_launch``.
    """
    module = trainer.lightning_module
    is_compiled = _uncompile(module)
    module_name = type(module).__name__
    flags: Any = trainer  # mypy does not see attributes set by Lightning's connectors
    fn = trainer.state.fn
    if fn in (TrainerFn.TESTING, TrainerFn.PREDICTING) and not (before_launch or lightning_internals.has_data(trainer)):
        raise errors.UnsupportedTrainerFlags(
            f"{fn.value}() of a trial needs data: pass dataloaders=, or use validate(). A trial has training and "
            "validation data only."
        )
    unsupported = _find_unsupported_callbacks(trainer)
    unknown = [one for one in trainer.loggers if not isinstance(one, pl.loggers.Logger) and _describe(one) is None]
    others = {type(one).__name__ for one in unknown}
    if others:
        trainer.loggers = []  # Lightning would call them after the refusal, too
    wrong = {
        f"accumulate_grad_batches={trainer.accumulate_grad_batches}": (
            trainer.accumulate_grad_batches != 1 and aggregation not in (None, trainer.accumulate_grad_batches),
            f"it means the same as aggregation_frequency, which is {aggregation}; pass only one",
        ),
        f"reload_dataloaders_every_n_epochs={flags.reload_dataloaders_every_n_epochs}": (
            flags.reload_dataloaders_every_n_epochs > 0,
            "leave it out: the training data are one endless stream",
        ),
        "a time as val_check_interval": (
            lightning_internals.validates_by_time(trainer),
            "give a number of batches or a share of an epoch, so that equal runs validate after the same batches",
        ),
        f"a logger of type {', '.join(sorted(others))}": (
            bool(others),
            "pass objects, such as logger=pl.loggers.CSVLogger('logs'), or True or False",
        ),
        f"precision={trainer.precision!r}": (
            trainer.precision not in TRIAL_PRECISIONS,
            f"use one of {', '.join(TRIAL_PRECISIONS)}, or choose a precision in the trial's __init__",
        ),
        f"strategy={type(trainer.strategy).__name__} on {trainer.world_size} devices": (
            not _trains_trials(trainer),
            "use a strategy that trains a trial's models: strategy="
            + " or ".join(repr(known.strategy_name) for known in TRIAL_STRATEGIES)
            + ", which pl.Trainer knows once det_lightning.adapters is imported",
        ),
        f"torch.compile({module_name})": (
            is_compiled,
            f"compile the models in the trial's __init__, before wrap_model(), and train the {module_name} itself",
        ),
    }
    found = [f"{flag}: {instead}" for flag, (used, instead) in wrong.items() if used]
    _refuse(found + unsupported)


def _refuse(found: list[str]) -> None:
    if found:
        raise errors.UnsupportedTrainerFlags("pl.Trainer cannot train a trial with " + "; and with ".join(found) + ".")


def _trains_trials(trainer: pl.Trainer) -> bool:
    strategy = trainer.strategy
    if trainer.world_size == 1 and isinstance(strategy, pl.strategies.SingleDeviceStrategy):
        return True
    # A subclass of Lightning's strategies does something else, such as DeepSpeed.
    return isinstance(strategy, TRIAL_STRATEGIES) or type(strategy) in REPLACED_STRATEGIES


def refuse_unsupported_callbacks(trainer: pl.Trainer) -> None:
    """Raise an UnsupportedTrainerFlags naming every callback that cannot work with a trial."""
    _refuse(_find_unsupported_callbacks(trainer))


def _find_unsupported_callbacks(trainer: Any) -> list[str]:
    return [
        *(
            f"{type(callback).__name__}: {instead}"
            for callback in trainer.callbacks
            for unsupported, instead in (
                _UNSUPPORTED_CALLBACKS | (_IN_ONE_PROCESS if trainer.world_size > 1 else {})
            ).items()
            if isinstance(callback, unsupported)
        ),
        *describe_other_package(trainer),
    ]


def _uncompile(module: pl.LightningModule) -> bool:
    try:
        pl.utilities.compile.to_uncompiled(module)
    except ValueError:  # the module was not compiled
        return False
    return True


class InterceptedFlags:
    """Flags that the trial obeys itself; they are off for Lightning until :meth:`restore`.

    Attributes:
        datamodule, data: the data module of the call, and functions for its data.
        accumulated_batches, clip_val, clip_algorithm, precision: the values of flags, for the trial.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.datamodule = lightning_internals.find_datamodule(trainer)
        self.data: dict[str, Callable[[], Any]] = {}
        if trainer.training or trainer.validating:
            call_dataloaders.refuse_moving_hooks(self.datamodule)
            self.data = lightning_internals.take_call_dataloaders(trainer)
        self._trainer = trainer
        self._clip_val = trainer.gradient_clip_val
        self._check_val_every_n_epoch = trainer.check_val_every_n_epoch
        self.accumulated_batches = trainer.accumulate_grad_batches
        self.clip_val = self._clip_val or None
        self.clip_algorithm = trainer.gradient_clip_algorithm
        self.precision = take_precision(trainer)
        trainer.gradient_clip_val = None
        trainer.accumulate_grad_batches = 1

    def restore(self) -> None:
        """Restore the trainer's flags."""
        self._trainer.gradient_clip_val = self._clip_val
        self._trainer.check_val_every_n_epoch = self._check_val_every_n_epoch
        self._trainer.accumulate_grad_batches = self.accumulated_batches


logger = get_logger(__name__)

_LATER = "do it in on_fit_start(), when the trial is built, or in the trial's __init__"


# By the start of a module's name, the package of the module, and the module's name in the other package.
_COUNTERPARTS = {
    "pytorch_lightning": ("pytorch_lightning", "lightning.pytorch"),
    "lightning_fabric": ("pytorch_lightning", "lightning.fabric"),
    "lightning.pytorch": ("lightning", "pytorch_lightning"),
    "lightning.fabric": ("lightning", "lightning_fabric"),
}


def warn_of_mixture() -> None:
    """Warn if the program has imported the other package of Lightning: trainers of the other package refuse a trial."""
    if OTHER in sys.modules:
        logger.warning(
            "This program imports both lightning and pytorch_lightning, and TrialModule is a LightningModule of %s: a "
            "trainer of %s refuses the module. Import Lightning as %s everywhere; or import %s before det_lightning, "
            "or set %s=%s.",
            *(PACKAGE, OTHER, PACKAGE, OTHER, VARIABLE, OTHER),
        )


def describe_other_package(trainer: pl.Trainer) -> list[str]:
    """Return a sentence for each callback, logger and plugin of a trainer from the other package."""
    flags: Any = trainer  # mypy does not see attributes set by Lightning's connectors
    strategy = trainer.strategy
    plugins = [
        strategy,
        strategy.precision_plugin,
        strategy.checkpoint_io,
        getattr(strategy, "cluster_environment", None),
    ]
    parts = [*flags.callbacks, *trainer.loggers, flags.profiler, flags.datamodule, *plugins]
    return [sentence for part in parts if (sentence := _describe(part)) is not None]


def _describe(part: Any) -> str | None:
    for kind in type(part).__mro__:
        start = ".".join(kind.__module__.split(".")[: 2 if kind.__module__.startswith("lightning.") else 1])
        package, counterpart = _COUNTERPARTS.get(start, (PACKAGE, ""))
        if package != PACKAGE:
            public = kind.__module__.removeprefix(start).split(".")[1:2]
            line = f"from {'.'.join([counterpart, *public])} import {kind.__name__}"
            derived = "" if kind is type(part) else f"a {kind.__name__} "
            if library := _find_library(type(part), kind):
                return (
                    f"{type(part).__name__} of {library}, {derived}of {OTHER}: the trainer is from {PACKAGE}, and must "
                    f"be from {OTHER} too. Train with {OTHER}: import {start} before det_lightning, or set "
                    f"{VARIABLE}={OTHER}"
                )
            return f"{type(part).__name__}, {derived}of {OTHER}: the trainer is from {PACKAGE}, so write `{line}`"
    return None


def _find_library(derived: type, kind: type) -> str:
    """Return the installed library whose class derives from one of Lightning's; empty for a class of the user."""
    name = derived.__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    is_own = name == "__main__" or (file is not None and not {"site-packages", "dist-packages"} & {*Path(file).parts})
    return "" if is_own or derived is kind else name.partition(".")[0]


def refuse_changed_hparams(module: pl.LightningModule) -> None:
    """Raise an InvalidExperimentException naming the hyperparameters changed on the module since it was made."""
    initial, now = (
        {name: json.dumps(value, default=lambda it: type(it).__name__, skipkeys=True) for name, value in of.items()}
        for of in (module.hparams_initial, module.hparams)
    )
    if names := sorted(str(name) for name in {*initial, *now} if initial.get(name) != now.get(name)):
        raise errors.InvalidExperimentException(
            f"module.hparams was changed ({', '.join(names)}), and the trial trains with the hyperparameters that its "
            f"module was made with. Create a new module: {type(module).__name__}(..., hparams={{...}})."
        )


def refuse_changed_type(module: pl.LightningModule, initial: Any) -> None:
    """Raise an InvalidExperimentException if the module was cast to another type before its trial is built."""
    if module.dtype != initial:
        raise errors.InvalidExperimentException(
            f"The module was cast to {module.dtype} before fit(), which builds its trial anew, in {initial}. Leave the "
            "cast out, and use pl.Trainer(precision=...), such as precision='64-true'; or cast in the trial's __init__."
        )


def refuse_automatic_optimization(module: pl.LightningModule) -> None:
    """Raise an InvalidExperimentException if Lightning is to update the weights: the trial does so itself."""
    if module.automatic_optimization:
        raise errors.InvalidExperimentException(
            "module.automatic_optimization was set to True, and a trial steps its optimizers itself: leave it False."
        )


def warn_of_evaluation_mode(modules: Iterable[torch.nn.Module]) -> None:
    """Warn if modules are in evaluation mode when training begins, since models train in training mode."""
    if not all(module.training for module in modules):
        logger.warning(
            "The module, or a part of it, is in evaluation mode. As in Determined, a trial trains in training mode: "
            "call eval() for that part in the trial's train_batch()."
        )


def warn_of_second_fit(trainer: pl.Trainer) -> None:
    """Warn if a trainer would continue the training of a plain module: a trial begins at batch 0 again."""
    done = trainer.fit_loop.epoch_progress.current.completed
    if done and not trainer.fit_loop.done:
        logger.warning(
            "The trainer has trained %d epochs, and this fit() begins at epoch 0 again, with the weights as they are. "
            "To resume instead, save a checkpoint and pass ckpt_path=.",
            done,
        )


def warn_of_lost_callbacks(trainer: Any) -> None:
    """Warn of Lightning callbacks without a state in the checkpoint of a resumed training."""
    if names := sorted({type(callback).__name__ for callback in trainer.callbacks if callback.state_dict()}):
        logger.warning(
            "The checkpoint has no states of Lightning's callbacks: %s start over. With "
            "pl.Trainer(plugins=[DeterminedCheckpointIO()]) a ModelCheckpoint also writes these states.",
            ", ".join(names),
        )


def warn_of_missing_parameters(module: torch.nn.Module) -> None:
    """Warn if the parameters of a module are read before the trial is built, for example by ``freeze()``."""
    logger.warning(
        "%s has no parameters of its trial before fit(), which builds the trial. Calls that need parameters, such as "
        "freeze(), requires_grad_(), apply(), state_dict(), watch() of a logger or an optimizer, have no effect: %s.",
        *(type(module).__name__, _LATER),
    )


def refuse_lost_changes(loaded: list[torch.nn.Module], built: list[torch.nn.Module]) -> None:
    """Raise an InvalidExperimentException if loaded models have changes besides weights: building anew loses those."""
    changes = {
        "frozen parameters (freeze() or requires_grad_())": any(
            not old.requires_grad and new.requires_grad for old, new in _pairs(loaded, built)
        ),
        "hooks (watch() of a logger, or register_hook())": any(
            getattr(old, "_backward_hooks", None) and not getattr(new, "_backward_hooks", None)
            for old, new in _pairs(loaded, built)
        ),
    }
    if found := [name for name, is_found in changes.items() if is_found]:
        raise errors.InvalidExperimentException(
            f"The module that was loaded from a checkpoint has {' and '.join(found)}, and fit() builds the trial "
            f"again, with the weights only: {_LATER}."
        )


def _pairs(loaded: list[torch.nn.Module], built: list[torch.nn.Module]) -> Iterator[tuple[Any, Any]]:
    for old, new in zip(loaded, built, strict=False):
        yield from zip([*old.parameters()], [*new.parameters()], strict=False)


def warn_of_second_trainer(context: PyTorchTrialContext) -> None:
    """Warn if a new trainer continues with optimizers and schedulers from another trainer's ``fit``."""
    kept = ["the state of its optimizers, such as momentum"] if any(one.state for one in context.optimizers) else []
    kept += ["its learning rate schedulers"] if context.lr_schedulers else []
    if kept and context.distributed.rank == 0:
        logger.warning(
            "Another pl.Trainer has trained this module, and the trial keeps %s. A plain LightningModule would begin "
            "with new ones, from configure_optimizers(). To begin anew with these weights, fit a new TrialModule after "
            "new.load_state_dict(module.state_dict()); to continue the run, pass ckpt_path=.",
            " and ".join(kept),
        )
