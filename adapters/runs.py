"""Starting the runs of a ``TrialModule``: a run of the engine, and a driver for Lightning's hooks."""

from __future__ import annotations

from typing import Any

from det_lightning.adapters import flags
from det_lightning.adapters.driver import RunDriver
from det_lightning.adapters.flags import TakenFlags
from det_lightning.adapters.given_data import GivenLoaders, warn_of_lost_state
from det_lightning.adapters.hooks import WatchedHooks
from det_lightning.adapters.lightning_loops import TrialCalls
from det_lightning.adapters.lightning_package import pl
from det_lightning.adapters.reporting import LightningReporter
from det_lightning.adapters.trial_schedule import ModuleSchedule
from det_lightning.engine.boundary import RunOptions
from det_lightning.engine.run import TrialRun


class ModuleRuns:
    """The runs of a module, one for each ``fit`` and ``validate``.

    Attributes:
        latest: the current or the latest run.
        fitted: the latest run of a ``fit``.
    """

    def __init__(self, schedule: ModuleSchedule) -> None:
        self.latest: TrialRun | None = None
        self.fitted: TrialRun | None = None
        self._schedule = schedule
        self._fitted_by: pl.Trainer | None = None
        self._training_names: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Copy no runs and no trainer: these belong to the original module."""
        return {**vars(self), "latest": None, "fitted": None, "_fitted_by": None}

    def start(self, module: Any, base: type[pl.LightningModule], taken: TakenFlags) -> None:
        """Make the run of a trainer's call; the module, which derives from ``base``, gets the driver."""
        trainer: Any = module.trainer  # mypy does not see attributes set by Lightning's connectors
        trial, context = module.require_built_trial()
        if not trainer.training and self.fitted is not None and self.fitted.before_final_validation is None:
            self.fitted.keep_state_before_validation()  # for later checkpoints
        checkpoints = module.checkpoints
        if checkpoints is not None:
            warn_of_lost_state(trainer)
        if trainer.training and self._fitted_by not in (None, trainer) and module.resume_content is None:
            flags.warn_of_second_trainer(context)
        timer = taken.validation_timer(context)
        period = None if checkpoints is None else checkpoints.policy.period
        schedule = self._schedule.complete(trainer, context.position, period, timer)
        reporter = LightningReporter(module, base, self._training_names)
        hooks = WatchedHooks(trainer, module, base, taken)
        options = RunOptions(
            resumed=module.resume_content,
            stop_request=module.stop_request,
            epoch_limit=trainer.limit_train_batches,
            overfits=trainer.training and trainer.overfit_batches > 0,
            keeps_training_metrics=hooks.see_training_batches,
            keeps_validation_metrics=hooks.see_validation_batches,
            hooks_follow_report=hooks.may_end_run("on_train_batch_end"),
            hooks_follow_validation=hooks.may_end_run("on_validation_end"),
            has_checkpoint_news=checkpoints.has_news if checkpoints is not None else lambda: False,
        )
        run = TrialRun(trial, context, schedule, [reporter, *module.reporters], options)
        if checkpoints is not None:
            checkpoints.attach(run)
        at_step_zero = self._schedule.validates_at_step_zero
        module.driver = RunDriver(trainer, run, checkpoints, hooks, reporter, timer, at_step_zero)
        loaders = GivenLoaders(trial, context, taken.data, trainer)
        calls = TrialCalls(
            after_training_step=module.after_training_step,
            after_validation_step=module.after_validation_step,
            after_validation=module.after_validation,
        )
        module.driver.start_up(loaders, calls)
        loaders.require_epochs(run.data.epoch_len)
        self.latest = run
        if trainer.training:
            self.fitted = run
            self._fitted_by = trainer
