"""Decides precision, schedule and settings of a run by the flags of a ``pl.Trainer``, and builds the trial by them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from det_lightning import errors
from det_lightning.adapters import lightning_internals
from det_lightning.adapters.lightning_package import TrainerFn, pl
from det_lightning.adapters.strategies.processes import TrainingProcesses
from det_lightning.arguments import refuse_texts, wrong_argument
from det_lightning.distributed.backend import LocalBackend
from det_lightning.engine.schedule import Schedule
from det_lightning.escaping import get_logger
from det_lightning.files.plain_values import MOST_IN_SETTINGS, as_plain
from det_lightning.precision import WholeModelPrecision
from det_lightning.pytorch._position import TrainingPosition
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial, adapt_legacy_trial, build_trial
from det_lightning.pytorch._settings import ExpConf, RunConfiguration, TrialSettings
from det_lightning.units import Batch, Epoch, TrainUnit

_TYPES = {
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "64-true": torch.float64,
}
#: The values of ``pl.Trainer(precision=...)`` for trials.
TRIAL_PRECISIONS = ("32-true", *_TYPES)


class TrialPrecision(pl.plugins.Precision):
    """Replaces Lightning's plugin, whose autocast would cover the whole step, with backward passes and updates."""

    def __init__(self, precision: Any) -> None:
        self.precision = precision


def take_precision(trainer: pl.Trainer) -> WholeModelPrecision | None:
    """Replace Lightning's precision plugin; return the precision for each wrapped model, or None for float32."""
    plugin = trainer.strategy.precision_plugin
    dtype = _TYPES.get(plugin.precision)
    if dtype is None:
        return None
    scales = plugin.precision == "16-mixed"
    if not isinstance(plugin, TrialPrecision):
        trainer.strategy.precision_plugin = TrialPrecision(plugin.precision)
    return WholeModelPrecision(
        f"pl.Trainer(precision={plugin.precision!r})",
        dtype,
        casts_weights=plugin.precision.endswith("-true"),
        scales=scales,
        scaler=getattr(plugin, "scaler", None) if scales else None,
    )


class TrialBuilder:
    """Builds a trial once the device is known, or takes a built trial.

    The arguments and the errors are those of :class:`TrialModule`; ``settings`` are the settings of a context.

    Attributes:
        configuration: the experiment configuration of the call or of the given context.
        aggregation: ``aggregation_frequency`` of the call or of the given context; None by default.
        owns_context: the builder makes the context.
        plain_hparams: a copy of the hyperparameters as plain values; None if a context was given.
    """

    def __init__(
        self,
        trial: type[PyTorchTrial] | PyTorchTrial,
        context: PyTorchTrialContext | None,
        trial_kwargs: dict[str, Any] | None,
        exp_conf: ExpConf | None,
        hparams: dict[str, Any] | None,
        **settings: Any,
    ) -> None:
        if not (context is None or isinstance(context, PyTorchTrialContext)):
            wanted = "the context of `with init(...) as context`"
            raise TypeError(wrong_argument("TrialModule(context=...)", wanted, context))
        built = isinstance(trial, PyTorchTrial)
        self.owns_context = context is None
        self.aggregation: int | None = settings["aggregation_frequency"]
        self.plain_hparams: dict[str, Any] | None = None
        if context is None:
            self.configuration = RunConfiguration.of_call(exp_conf, hparams)
            said = self.configuration.complete(**settings)
            self.plain_hparams = as_plain(self.configuration.hparams, "hparams", [], MOST_IN_SETTINGS)
            refuse_texts("TrialModule()", average_aggregated_gradients=settings["average_aggregated_gradients"])
            TrialSettings(self.configuration.hparams, **said)  # refuses wrong values here rather than in fit()
        else:
            given = {
                "hparams": hparams,
                "exp_conf": exp_conf,
                "trial_kwargs": trial_kwargs if built else None,
                **settings,
            }
            if unused := ", ".join(name for name, value in given.items() if value is not None):
                raise TypeError(f"TrialModule(context=...) does not take {unused}: pass them to init() or the trial.")
            self.configuration = context.settings.configuration
            if context.settings.aggregation_frequency > 1:
                self.aggregation = context.settings.aggregation_frequency
            said = {}
        if not built and not (isinstance(trial, type) and issubclass(trial, PyTorchTrial)):
            raise TypeError(f"TrialModule takes a subclass of det_lightning.pytorch.PyTorchTrial; got {trial!r}.")
        if built and context is None:
            raise TypeError(f"TrialModule got a {type(trial).__name__} that was built already; pass context= too.")
        if not (trial_kwargs is None or isinstance(trial_kwargs, Mapping)):
            raise TypeError(wrong_argument("trial_kwargs=", "a dict of arguments after the context", trial_kwargs))
        self._trial = trial
        self._context = context
        self._trial_kwargs = trial_kwargs or {}
        self._context_kwargs = {
            "hparams": self.configuration.hparams,
            "exp_conf": self.configuration.exp_conf,
            "configuration": self.configuration,
            "enable_tensorboard_logging": False,
            **said,
        }
        self._own_aggregation: int | None = None

    def build(
        self, trainer: pl.Trainer, precision: WholeModelPrecision | None = None, accumulated_batches: int = 1
    ) -> tuple[PyTorchTrial, PyTorchTrialContext]:
        """Return the trial, adapted if legacy, and its context; the first call builds both.

        Unless ``accumulated_batches`` is 1, aggregate gradients over that number of batches. Outside of training,
        weights keep the type they were trained in unless ``precision`` says otherwise.

        Raises:
            InvalidExperimentException: the trial was built for fewer processes, so that ranks would train alone.
        """
        fn = trainer.state.fn
        exchanges = fn is not TrainerFn.PREDICTING
        if exchanges and self._context is not None and self._context.distributed.size < trainer.world_size:
            raise errors.InvalidExperimentException(
                f"The trial was built for {self._context.distributed.size} process(es), and this trainer has "
                f"{trainer.world_size}: pass the trainer a new TrialModule, with the class of the trial."
            )
        if self._context is None:
            processes = TrainingProcesses.from_trainer(trainer.strategy)
            self._context = PyTorchTrialContext(
                **self._context_kwargs, backend=processes.backend, distributed=processes.distributed
            )
        if self._own_aggregation is None:
            self._own_aggregation = self._context.settings.aggregation_frequency
        self._context.settings.aggregate_over(
            self._own_aggregation if accumulated_batches == 1 else accumulated_batches
        )
        if precision is not None or fn is TrainerFn.FITTING or not self._context.precision.whole_models.casts_weights:
            self._context.precision.use_whole_model_precision(precision)
        is_new = isinstance(self._trial, type)
        trial = self._build_trial(self._context)
        if is_new:
            self._context.wrapped.require_same_on_all_ranks()
        return trial, self._context

    def _build_trial(self, context: PyTorchTrialContext) -> PyTorchTrial:
        trial = self._trial
        if isinstance(trial, type):
            trial = build_trial(trial, context, self._trial_kwargs)
        self._trial = adapt_legacy_trial(trial, context)
        return self._trial

    def build_alone(self, device: torch.device) -> tuple[PyTorchTrial, PyTorchTrialContext]:
        """Return a trial that only holds weights, and its context, both unknown to :meth:`build`; or the given trial.

        Models stay where they were created; batches go to ``device``.
        """
        if self._context is not None:
            return self._build_trial(self._context), self._context
        assert isinstance(self._trial, type)
        arguments = {"trial_seed": 0, **self._context_kwargs}
        context = PyTorchTrialContext(**arguments, backend=LocalBackend(device), loading_only=True)
        return adapt_legacy_trial(build_trial(self._trial, context, self._trial_kwargs), context), context

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks of an error, if the builder made the context."""
        if self.owns_context and self._context is not None:
            self._context.distributed.abandon(error)


logger = get_logger(__name__)

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
        refuse_texts("TrialModule()", step_zero_validation=step_zero_validation, test_mode=test_mode)
        given = {"max_length": max_length, "validation_period": validation_period, "reporting_period": reporting_period}
        configured = configuration.find_missing({**given, "step_zero_validation": step_zero_validation})
        self.validates_at_step_zero = bool(configured.pop("step_zero_validation", step_zero_validation))
        self._given = Schedule(max_length, validation_period, None, reporting_period, test_mode)
        self._configured = Schedule(**configured)

    def complete(
        self,
        trainer: Any,
        position: TrainingPosition,
        checkpoint_period: TrainUnit | None,
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
            validation_period=validation_period or _read_validation_flags(trainer, position),
            checkpoint_period=checkpoint_period,
            reporting_period=reporting_period or Batch(max(1, trainer.log_every_n_steps)),
            test_mode=given.test_mode,
        )


def _warn_of_default_length(trainer: Any) -> None:
    """Warn as Lightning does when a trainer is created, which is too early to know of the trial's ``max_length``."""
    if trainer.max_epochs == _DEFAULT_MAX_EPOCHS and trainer.max_steps == -1:
        logger.warning(
            "The run ends after %d epochs, which is Lightning's default. Set pl.Trainer(max_epochs=...) or "
            "TrialModule(..., max_length=Batch(n) or Epoch(n)).",
            _DEFAULT_MAX_EPOCHS,
        )


def _read_validation_flags(trainer: Any, position: TrainingPosition) -> TrainUnit | None:
    if not trainer.enable_validation:
        return None
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
