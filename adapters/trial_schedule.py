"""The schedule of a trial's run: the arguments of its module, flags of ``pl.Trainer``, the configuration."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from typing import Any

from det_lightning.adapters import lightning_internals
from det_lightning.adapters.lightning_package import TrainerFn
from det_lightning.engine.schedule import Schedule
from det_lightning.escaping import get_logger
from det_lightning.pytorch._position import TrainingPosition
from det_lightning.pytorch._settings import RunConfiguration
from det_lightning.ranks.distributed_context import DistributedContext
from det_lightning.units import Batch, Epoch, TrainUnit

logger = get_logger(__name__)

#: The clock for intervals, in seconds.
clock = time.monotonic

# The defaults of pl.Trainer.
_DEFAULT_LOG_EVERY = 50
_DEFAULT_MAX_EPOCHS = 1000


class ModuleSchedule:
    """The schedule from the arguments of a module, completed by the flags of a trainer.

    The arguments are those of ``TrialModule``. Raise a TypeError if a period is not a ``Batch`` or ``Epoch``.

    Attributes:
        validates_at_step_zero: validate before the first batch.
    """

    def __init__(
        self,
        configuration: RunConfiguration,
        max_length: TrainUnit | None,
        validation_period: TrainUnit | Sequence[TrainUnit] | None,
        reporting_period: TrainUnit | None,
        step_zero_validation: bool | None,
        test_mode: int,
    ) -> None:
        given = {"max_length": max_length, "validation_period": validation_period, "reporting_period": reporting_period}
        self._given = Schedule(max_length, validation_period, None, reporting_period, test_mode)
        self._configured = Schedule(**configuration.find_missing(given))
        at_start = configuration.complete(step_zero_validation=step_zero_validation)
        self.validates_at_step_zero: bool = at_start.get("step_zero_validation", False)

    def complete(
        self,
        trainer: Any,
        position: TrainingPosition,
        checkpoint_period: TrainUnit | None,
        timer: ValidationTimer | None = None,
    ) -> Schedule:
        """Return the schedule of a run.

        The module's arguments come first, then flags set on ``trainer``, then the configuration, then the flags'
        defaults.
        """
        given = self._given
        configured = self._configured
        limits_training = trainer.max_steps != -1 or trainer.max_epochs not in (-1, None, _DEFAULT_MAX_EPOCHS)
        max_length = given.max_length or (None if limits_training else configured.max_length)
        if max_length is None and trainer.state.fn is TrainerFn.FITTING:
            _warn_of_default_length(trainer)
        sets_validation = (
            not trainer.enable_validation or trainer.val_check_interval != 1.0 or trainer.check_val_every_n_epoch != 1
        )
        validation_period = given.validation_period or (None if sets_validation else configured.validation_period)
        if validation_period is not None:
            lightning_internals.announce_no_validations(trainer)
        reporting_period = given.reporting_period
        if reporting_period is None and trainer.log_every_n_steps == _DEFAULT_LOG_EVERY:
            reporting_period = configured.reporting_period
        return Schedule(
            max_length=max_length,
            validation_period=validation_period or _read_validation_flags(trainer, position, timer),
            checkpoint_period=checkpoint_period,
            reporting_period=reporting_period or Batch(max(1, trainer.log_every_n_steps)),
            test_mode=given.test_mode,
        )


def _warn_of_default_length(trainer: Any) -> None:
    """Warn as Lightning does on creating a trainer, before anybody knows whether the trial has a ``max_length``."""
    if trainer.max_epochs == _DEFAULT_MAX_EPOCHS and trainer.max_steps == -1:
        logger.warning(
            "The run ends after %d epochs, which is Lightning's default. Set pl.Trainer(max_epochs=...) or "
            "TrialModule(..., max_length=Batch(n) or Epoch(n)).",
            _DEFAULT_MAX_EPOCHS,
        )


def _read_validation_flags(trainer: Any, position: TrainingPosition, timer: ValidationTimer | None) -> TrainUnit | None:
    if not trainer.enable_validation:
        return None
    if timer is not None:
        return Batch(timer)
    interval = trainer.val_check_interval
    every_epochs = trainer.check_val_every_n_epoch
    if every_epochs is None:
        return Batch(int(interval))
    if interval == 1.0 and isinstance(interval, float):
        return Epoch(every_epochs)
    return Batch(_InEpochSchedule(position, interval, every_epochs))


class _InEpochSchedule(Container[int]):
    """The batches of a whole run at which Lightning's ``val_check_interval`` asks for a validation."""

    def __init__(self, position: TrainingPosition, interval: float, every_epochs: int) -> None:
        self._position = position
        self._interval = interval
        self._every_epochs = every_epochs

    def __contains__(self, batches_trained: object) -> bool:
        if not isinstance(batches_trained, int):
            return False
        epoch_len = self._position.epoch_length()
        interval = self._interval
        every_batches = interval if isinstance(interval, int) else max(1, int(epoch_len * interval))
        epoch, batch = divmod(batches_trained - 1, epoch_len)
        return (epoch + 1) % self._every_epochs == 0 and (batch + 1) % every_batches == 0


class ValidationTimer(Container[int]):
    """The batches after which ``interval_s`` has passed since the latest validation, or since training began.

    The chief's clock decides, so all ranks must ask together. ``every_epochs`` limits validations to every n-th epoch,
    as in Lightning; None or 1 means no limit.
    """

    def __init__(
        self,
        interval_s: float,
        every_epochs: int | None,
        position: TrainingPosition,
        distributed: DistributedContext,
    ) -> None:
        self._interval_s = interval_s
        self._every_epochs = every_epochs or 1
        self._position = position
        self._distributed = distributed
        self._since = clock()

    def restart(self) -> None:
        """Measure from now on."""
        self._since = clock()

    def __contains__(self, batches_trained: object) -> bool:
        if not isinstance(batches_trained, int):
            return False
        epoch = (batches_trained - 1) // self._position.epoch_length()
        if (epoch + 1) % self._every_epochs != 0:
            return False
        return bool(self._distributed.broadcast(clock() - self._since >= self._interval_s))
