"""``TrialModule``, the ``LightningModule`` with a trial inside: makes a run for each call, and passes hooks on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from det_lightning import errors
from det_lightning.adapters import flags
from det_lightning.adapters.building import ModuleSchedule, TrialBuilder
from det_lightning.adapters.call_dataloaders import CallDataloaders, holds_nothing, warn_of_lost_state
from det_lightning.adapters.driver import RunDriver, StopIterationGuard, add_callbacks
from det_lightning.adapters.flags import InterceptedFlags
from det_lightning.adapters.hooks import WatchedHooks, refuse_unsupported_methods, requires_super
from det_lightning.adapters.inference import InferenceModule
from det_lightning.adapters.lightning_checkpoint import TrialCheckpointIO, add_content, take_content
from det_lightning.adapters.lightning_loops import TrialCalls, use_trial_loops
from det_lightning.adapters.lightning_package import TrainerFn, pl
from det_lightning.adapters.reporting import LightningReporter
from det_lightning.adapters.strategies.processes import use_trial_strategy
from det_lightning.checkpoint.format.content import CheckpointContent, CheckpointReading
from det_lightning.engine.boundary import Reporter, RunOptions, StopRequest
from det_lightning.engine.checkpointing import RunCheckpoints
from det_lightning.engine.run import TrialRun
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import ExternalStateTrial, PyTorchTrial
from det_lightning.pytorch._settings import ExpConf
from det_lightning.units import TrainUnit

_NO_RUN = "A run begins with pl.Trainer.fit() or validate(), not with Fabric or a loop of one's own."
# Configuration fields for arguments of DeterminedCheckpoint.
_OF_CHECKPOINTS = ("checkpoint_policy", "checkpoint_storage", "min_checkpoint_period")


class TrialModule(InferenceModule):
    """A Determined trial as a ``LightningModule``: fit, validate and log the module like any other.

    ``pl.Trainer`` chooses the device, then the module builds the trial. Epochs are Lightning's epochs, metrics are
    logged by Lightning. One Lightning step trains several batches, unless a callback looks at each batch.

    Args:
        trial: a subclass of ``PyTorchTrial``, or a built trial together with its ``context``.
        hparams: hyperparameters for the trial's context. Default to ``exp_conf``'s, with the middle of each range.
        exp_conf: experiment configuration for the trial's context, as a YAML file or a dict, complete or partial. Other
            arguments and the flags of ``pl.Trainer`` come first. Fields about checkpoints have no effect (see
            ``DeterminedCheckpoint``), and no seed is set.
        trial_kwargs: arguments of the trial in addition to the context.
        aggregation_frequency: number of batches whose gradients make one optimizer update.
        average_aggregated_gradients: divide the gradients of an update by ``aggregation_frequency``.
        trial_seed: the value of ``context.get_trial_seed()``.
        max_length: number of batches or epochs before a final validation. Defaults to the length of ``pl.Trainer``, or
            else of ``exp_conf``.
        validation_period: one period or several. Defaults to ``check_val_every_n_epoch`` and ``val_check_interval`` of
            ``pl.Trainer``.
        reporting_period: defaults to ``log_every_n_steps`` of ``pl.Trainer``.
        step_zero_validation: validate before the first batch.
        test_mode: True trains on a single batch and validates on a single batch. A larger number is the maximum number
            of batches to train on; validations are then complete, or without metrics if longer than 100 batches.
        context: the context of a built trial.
        reading: how to read the checkpoint in ``ckpt_path=``. By default, objects in the checkpoint are refused.

    Raises:
        ConfigError: Determined's master would refuse ``exp_conf``; all mistakes are named.
        TypeError: ``trial`` is not a trial, a period is not a ``Batch`` or ``Epoch``, or an argument is already part of
            ``context``.
        InvalidExperimentException: ``hparams`` or ``exp_conf`` is not a dict, or a hyperparameter is unusable.

    Example:
        >>> import pytorch_lightning as pl
        >>> from det_lightning.adapters import TrialModule
        >>> from model_def import MyTrial
        >>> module = TrialModule(MyTrial, hparams={"lr": 0.01, "global_batch_size": 8})
        >>> trainer = pl.Trainer(max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
        >>> trainer.fit(module)
        >>> sorted(name for name in trainer.callback_metrics)
        ['loss', 'validation_loss']
    """

    driver: RunDriver | None
    checkpoints: RunCheckpoints | None
    stop_request: StopRequest | None
    reporters: list[Reporter]
    resume_content: CheckpointContent | None
    _latest_run: TrialRun | None  # the current or the latest run, of a fit or a validate
    _fitted_run: TrialRun | None  # the latest run of a fit
    _fitted_by: pl.Trainer | None
    _intercepted: InterceptedFlags | None  # the flags that the trial obeys, during a call of a trainer

    def __init__(
        self,
        trial: type[PyTorchTrial] | PyTorchTrial,
        hparams: dict[str, Any] | None = None,
        *,
        exp_conf: ExpConf | None = None,
        trial_kwargs: dict[str, Any] | None = None,
        aggregation_frequency: int | None = None,
        average_aggregated_gradients: bool | None = None,
        trial_seed: int | None = None,
        max_length: TrainUnit | None = None,
        validation_period: TrainUnit | Sequence[TrainUnit] | None = None,
        reporting_period: TrainUnit | None = None,
        step_zero_validation: bool | None = None,
        test_mode: int | bool = False,
        context: PyTorchTrialContext | None = None,
        reading: CheckpointReading | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.trial_builder = TrialBuilder(
            trial,
            context,
            trial_kwargs,
            exp_conf,
            hparams,
            aggregation_frequency=aggregation_frequency,
            average_aggregated_gradients=average_aggregated_gradients,
            trial_seed=trial_seed,
        )
        configuration = self.trial_builder.configuration
        schedule = ModuleSchedule(
            configuration, max_length, validation_period, reporting_period, step_zero_validation, test_mode
        )
        self._run_schedule = schedule
        self._type_at_first = self.dtype
        self._training_names: set[str] = set()
        self._reading = reading or CheckpointReading()
        vars(self).update(_make_state_of_call(), **_make_state_of_runs())
        hparams = self.trial_builder.plain_hparams
        if hparams:
            self.save_hyperparameters(hparams)  # for Lightning's checkpoints and loggers, under the variable's name

    def __getstate__(self) -> dict[str, Any]:
        """Leave the runs out of copies, as Lightning leaves out the trainer.

        Raise a TypeError if the trial belongs to several processes.
        """
        processes = 1 if self.context is None else self.context.distributed.size
        if processes > 1:
            raise TypeError(
                f"A {type(self).__name__} that has trained in {processes} processes can be neither copied nor pickled, "
                "since its trial holds their connections: copy the weights, module.state_dict(), or save a checkpoint "
                "and call TrialModule.load_from_checkpoint(path, trial=...)."
            )
        state: dict[str, Any] = super().__getstate__()
        return state | _make_state_of_call() | _make_state_of_runs()

    def check_before_launch(self, trainer: pl.Trainer) -> None:
        """Refuse unsupported flags before a strategy starts processes."""
        flags.refuse_unsupported_flags(trainer, self.trial_builder.aggregation, before_launch=True)

    @property
    def trainer(self) -> pl.Trainer:
        """The trainer of the module; setting one prepares it for the trial."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        pl.LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]
        if isinstance(trainer, pl.Trainer) and not self._is_part(trainer.lightning_module):
            self._prepare_trainer(trainer)
            vars(self).update(_make_state_of_call())

    def _prepare_trainer(self, trainer: pl.Trainer) -> None:
        """Adapt a trainer that begins a call to the trial, or refuse the trainer."""
        flags.refuse_unsupported_flags(trainer, self.trial_builder.aggregation)
        refuse_unsupported_methods(self, trains=trainer.training or trainer.validating)
        if trainer.training:
            flags.refuse_automatic_optimization(self)
            flags.refuse_changed_hparams(self)
            if self.driver is None:
                flags.refuse_changed_type(self, self._type_at_first)
                flags.warn_of_evaluation_mode([self])
            else:
                flags.warn_of_second_fit(trainer)
        if trainer.world_size > 1:
            use_trial_strategy(trainer)
        use_trial_loops(trainer)
        self._intercepted = InterceptedFlags(trainer)
        add_callbacks(trainer)

    def _is_part(self, whole: pl.LightningModule | None) -> bool:
        """Return whether this module is only a part of the trainer's module; refuse a part without weights."""
        if whole is self or whole is None:
            return False
        if self.context is None:
            name = type(self).__name__
            raise errors.InvalidExperimentException(
                f"The {name} inside {type(whole).__name__} has no weights: only the {name} that pl.Trainer is given "
                f"trains its trial. Give pl.Trainer the {name}, or build the part by {name}.load_from_checkpoint(path, "
                "trial=...), whose weights then train like those of any module."
            )
        return True

    def build_trial(self) -> None:
        """Build the trial for the trainer's call, unless the trial is built."""
        strategy = self.trainer.strategy
        if not isinstance(strategy.checkpoint_io, TrialCheckpointIO):
            strategy.checkpoint_io = TrialCheckpointIO(strategy.checkpoint_io, self._reading)
        # The trial's callbacks would see a sanity check as a validation; Determined has none.
        self.trainer.num_sanity_val_steps = 0
        intercepted = self._require_intercepted()
        runnable, context = self.trial_builder.build(
            self.trainer, intercepted.precision, intercepted.accumulated_batches
        )
        self.adopt_trial(runnable, context)
        if context.distributed.rank == 0:
            read = runnable.config_fields if isinstance(runnable, ExternalStateTrial) else ()
            context.settings.configuration.report("TrialModule", idle=_OF_CHECKPOINTS, read=read)

    def begin_data(self, method: str) -> None:
        """Prepare the data that one of Lightning's loops asks for next; in ``validate``, start the run."""
        if self.trainer.state.fn is not TrainerFn.FITTING:
            self.start_trial_run()
        if method == "train_dataloader":
            # Now and not with the first batch, because an iterator draws from the global random state.
            self.trial_run.data.training.begin()

    @requires_super("return the data from the trial's build_training_data_loader()")
    def train_dataloader(self) -> Any:
        """Return the training data of the run as callbacks see them; before a run, what the trial builds."""
        if self.driver is None:
            return self.build_training_loader()
        data = self.trial_run.data.shown_training
        self.called_super["train_dataloader"] = [data]
        return data

    @requires_super("return the data from the trial's build_validation_data_loader()")
    def val_dataloader(self) -> Any:
        """Return the validation data of the run as callbacks see them; before a run, what the trial builds."""
        if self.driver is None:
            return self.build_validation_loader()
        data = self.trial_run.data.shown_validation
        if holds_nothing(self.trial_run.data.validation.loader):
            return []
        self.called_super["val_dataloader"] = [data]
        return data

    # Training and validation

    @requires_super("put it in the trial's train_batch(), or in on_train_batch_start() and on_train_batch_end()")
    def training_step(self, dataloader_iter: Iterator[Any]) -> dict[str, Any] | None:
        """Train on batches up to the end of the step; see ``RunDriver.train``."""
        self.called_super["training_step"] = None
        driver = self.require_driver()
        with StopIterationGuard():
            return driver.train(dataloader_iter)

    @requires_super(
        "put it in the trial's evaluate_batch(), or in on_validation_batch_start() and on_validation_batch_end()"
    )
    def validation_step(self, dataloader_iter: Iterator[Any]) -> dict[str, Any] | None:
        """Evaluate batches up to the end of the step; see ``RunDriver.evaluate``."""
        self.called_super["validation_step"] = None
        with StopIterationGuard():
            return self.require_driver().evaluate(dataloader_iter)

    def after_training_step(self) -> None:
        """Report, save or stop after a step, and after the hooks at the end of the step."""
        self.require_super_call("training_step")
        del self.called_super["training_step"]
        with StopIterationGuard():
            self.require_driver().run_due_actions_after_step()

    def after_validation_step(self) -> None:
        """Check that the trial has evaluated the step."""
        self.require_super_call("validation_step")
        del self.called_super["validation_step"]

    def after_validation(self) -> None:
        """Save or stop after a validation, and after the hooks at the end of the validation."""
        with StopIterationGuard():
            if self.trainer.state.fn is TrainerFn.FITTING:
                self.require_driver().act_after_validation()

    def abandon(self, exception: BaseException) -> None:
        """End the run after an exception."""
        self.restore_flags()
        if self.driver is not None:
            self.driver.abandon(exception)
        if not isinstance(exception, SystemExit):  # such as Preempted
            self.trial_builder.abandon(exception)

    def restore_flags(self) -> None:
        """Restore the trainer's flags."""
        if self._intercepted is not None:
            self._intercepted.restore()
            self._intercepted = None

    def _require_intercepted(self) -> InterceptedFlags:
        assert self._intercepted is not None
        return self._intercepted

    # Checkpoints of Lightning

    def add_trial(self, checkpoint: dict[str, Any]) -> None:
        """Add the trial's state for a resume to a checkpoint, after ``on_save_checkpoint``."""
        add_content(checkpoint, self._fitted_run or self._latest_run)

    def take_trial(self, checkpoint: dict[str, Any]) -> None:
        """Keep the trial's part of a checkpoint until the loaders are built; before ``on_load_checkpoint``."""
        content = take_content(checkpoint, self, self.require_built_trial()[1])
        if content is not None:
            self.resume_content = content

    @property
    def trial_run(self) -> TrialRun:
        """The current or the latest run, under ``fit`` or ``validate``; an InternalException before the first."""
        if self._latest_run is None:
            raise errors.InternalException(_NO_RUN)
        return self._latest_run

    def require_driver(self) -> RunDriver:
        """Return the driver of the run; raise an InternalException before the run begins."""
        if self.driver is None:
            raise errors.InternalException(_NO_RUN)
        return self.driver

    def start_trial_run(self) -> None:
        """Make the run of this call, and build the loaders."""
        intercepted = self._require_intercepted()
        trainer: Any = self.trainer  # mypy does not see attributes set by Lightning's connectors
        trial, context = self.require_built_trial()
        if not trainer.training and self._fitted_run is not None and self._fitted_run.before_final_validation is None:
            self._fitted_run.keep_state_before_validation()  # for later checkpoints
        checkpoints = self.checkpoints
        if checkpoints is not None:
            warn_of_lost_state(intercepted.datamodule)
        if trainer.training and self._fitted_by not in (None, trainer) and self.resume_content is None:
            flags.warn_of_second_trainer(context)
        period = None if checkpoints is None else checkpoints.policy.period
        schedule = self._run_schedule.complete(trainer, context.position, period)
        reporter = LightningReporter(self, TrialModule, self._training_names)
        hooks = WatchedHooks(trainer, self, TrialModule, intercepted)
        options = RunOptions(
            resumed=self.resume_content,
            stop_request=self.stop_request,
            epoch_limit=trainer.limit_train_batches,
            overfits=trainer.training and trainer.overfit_batches > 0,
            keeps_training_metrics=hooks.see_training_batches,
            keeps_validation_metrics=hooks.see_validation_batches,
            hooks_follow_report=hooks.may_end_run("on_train_batch_end"),
            hooks_follow_validation=hooks.may_end_run("on_validation_end"),
            has_checkpoint_news=checkpoints.has_news if checkpoints is not None else lambda: False,
        )
        run = TrialRun(trial, context, schedule, [reporter, *self.reporters], options)
        if checkpoints is not None:
            checkpoints.attach(run)
        loaders = CallDataloaders(trial, context, intercepted.data, trainer)
        calls = TrialCalls(
            after_training_step=self.after_training_step,
            after_validation_step=self.after_validation_step,
            after_validation=self.after_validation,
        )
        at_step_zero = self._run_schedule.validates_at_step_zero
        self.driver = RunDriver(trainer, run, checkpoints, hooks, reporter, at_step_zero)
        self.driver.start_up(loaders, calls)
        loaders.require_epochs(run.data.epoch_len)
        self._latest_run = run
        if trainer.training:
            self._fitted_run = run
            self._fitted_by = trainer


def _make_state_of_call() -> dict[str, Any]:
    """Return the attributes of one call of a trainer, before it."""
    without: dict[str, Any] = dict.fromkeys(["driver", "checkpoints", "stop_request", "resume_content"])
    return {**without, "reporters": [], "called_super": {}, "_tested": None}


def _make_state_of_runs() -> dict[str, Any]:
    """Return the attributes that outlive a call, before the first."""
    return dict.fromkeys(["_latest_run", "_fitted_run", "_fitted_by", "_intercepted"])


def require_trial_module(callback: pl.Callback, module: pl.LightningModule) -> TrialModule:
    """Return the module, or raise a TypeError unless the module is a :class:`TrialModule`."""
    if not isinstance(module, TrialModule):
        raise TypeError(
            f"{type(callback).__name__} needs a det_lightning.adapters.TrialModule; got a {type(module).__name__}."
        )
    return module
