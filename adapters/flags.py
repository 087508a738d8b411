"""Flags and callbacks of ``pl.Trainer``: refusals, and flags obeyed by the trial in place of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from det_lightning import errors
from det_lightning.adapters import given_data, lightning_internals
from det_lightning.adapters.building import TRIAL_PRECISIONS, take_precision
from det_lightning.adapters.conflicts import describe_other_package
from det_lightning.adapters.lightning_package import TrainerFn, pl
from det_lightning.adapters.strategies.processes import REPLACED_STRATEGIES, TRIAL_STRATEGIES
from det_lightning.adapters.trial_schedule import ValidationTimer
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
    of_call = trainer.state.fn in (TrainerFn.TESTING, TrainerFn.PREDICTING)
    wrong = {
        f"accumulate_grad_batches={trainer.accumulate_grad_batches}": (
            trainer.accumulate_grad_batches != 1 and aggregation not in (None, trainer.accumulate_grad_batches),
            f"it means the same as aggregation_frequency, which is {aggregation}; pass only one",
        ),
        f"reload_dataloaders_every_n_epochs={flags.reload_dataloaders_every_n_epochs}": (
            flags.reload_dataloaders_every_n_epochs > 0,
            "leave it out: the training data are one endless stream",
        ),
        f"{trainer.state.fn.value if trainer.state.fn else None}() without data": (
            of_call and not before_launch and not lightning_internals.has_data(trainer),
            "pass dataloaders=, or use validate(): a trial has training and validation data only",
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
    _refuse(found + _find_unsupported_callbacks(trainer))


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


class TakenFlags:
    """Flags obeyed by the trial itself, and off for Lightning until :meth:`restore`.

    Attributes:
        data: functions for the data of the call.
        accumulated_batches, clip_val, clip_algorithm, precision: the values of flags, for the trial.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.data: dict[str, Callable[[], Any]] = {}
        if trainer.training or trainer.validating:
            given_data.refuse_moving_hooks(lightning_internals.find_datamodule(trainer))
            self.data = lightning_internals.take_given_data(trainer)
        self._trainer = trainer
        self._clip_val = trainer.gradient_clip_val
        self._check_val_every_n_epoch = trainer.check_val_every_n_epoch
        self.accumulated_batches = trainer.accumulate_grad_batches
        self.clip_val = self._clip_val or None
        self.clip_algorithm = trainer.gradient_clip_algorithm
        self.precision = take_precision(trainer)
        self._validation_interval_s = lightning_internals.take_validation_interval(trainer)
        trainer.gradient_clip_val = None
        trainer.accumulate_grad_batches = 1

    def validation_timer(self, context: PyTorchTrialContext) -> ValidationTimer | None:
        """Return a timer if ``val_check_interval`` is a time."""
        if self._validation_interval_s is None:
            return None
        every_epochs = self._trainer.check_val_every_n_epoch
        return ValidationTimer(self._validation_interval_s, every_epochs, context.position, context.distributed)

    def restore(self) -> None:
        """Set the flags of the trainer again."""
        self._trainer.gradient_clip_val = self._clip_val
        self._trainer.check_val_every_n_epoch = self._check_val_every_n_epoch
        self._trainer.accumulate_grad_batches = self.accumulated_batches
        if self._validation_interval_s is not None:
            lightning_internals.restore_validation_interval(self._trainer, self._validation_interval_s)
