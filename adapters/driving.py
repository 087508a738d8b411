"""``TrialDriving`` and other Lightning callbacks that call the driver, so that subclasses may override any hook."""

from __future__ import annotations

from typing import Any, TypeGuard

from det_lightning import errors
from det_lightning.adapters import flags, lightning_internals
from det_lightning.adapters.driver import StopIterationGuard
from det_lightning.adapters.hooks import DrivenModule
from det_lightning.adapters.lightning_package import pl


def _has_trial(module: pl.LightningModule) -> TypeGuard[Any]:
    """Return whether a module is a ``TrialModule``, which imports this file; a trainer may serve other modules too."""
    return isinstance(module, DrivenModule)


class TrialGuard(pl.Callback):
    """Builds the trial before other callbacks look at the module, and ends the run after an exception."""

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Build the trial, after a check of all callbacks."""
        if _has_trial(pl_module):
            flags.refuse_unsupported_callbacks(trainer)  # callbacks of the module's configure_callbacks() too
            # Behind the callbacks of the module's configure_callbacks().
            trainer.callbacks = sorted(trainer.callbacks, key=lambda one: isinstance(one, TrialDriving))
            pl_module.build_trial()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End the run."""
        if _has_trial(pl_module):
            pl_module.abandon(exception)


class TrialDriving(pl.Callback):
    """Runs the trial from the hooks of a trainer, after all other callbacks and before the module's own hooks.

    The loops of ``lightning_loops`` call the rest after the module's hooks.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the run, once all callbacks know the trial."""
        if _has_trial(pl_module):
            pl_module.require_same("configure_optimizers", trainer.strategy.optimizers)
            pl_module.start_trial_run()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to train."""
        if _has_trial(pl_module):
            pl_module.require_same("train_dataloader", [trainer.train_dataloader])
            pl_module.require_driver().begin_training()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report and save the rest."""
        if _has_trial(pl_module):
            pl_module.require_driver().finish()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prepare the trial for a validation."""
        if _has_trial(pl_module):
            pl_module.require_same("val_dataloader", [trainer.val_dataloaders])
            with StopIterationGuard():
                pl_module.trial_run.begin_validation()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reduce and report the metrics."""
        if _has_trial(pl_module):
            with StopIterationGuard():
                pl_module.require_driver().end_validation_epoch()

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Place the models."""
        if _has_trial(pl_module):
            pl_module.begin_prediction()

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the models back."""
        if _has_trial(pl_module):
            pl_module.end_evaluation()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Place the models, and begin to collect metrics."""
        if _has_trial(pl_module):
            pl_module.begin_test()

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the metrics."""
        if _has_trial(pl_module):
            pl_module.end_test_epoch()

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the models back."""
        if _has_trial(pl_module):
            pl_module.end_evaluation()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the run; raise ``Preempted`` if a process was asked to end, and everything is saved."""
        if not _has_trial(pl_module):
            return
        pl_module.restore_flags()
        if pl_module.driver is None:
            return
        pl_module.driver.close()
        run = pl_module.driver.run
        if run.early_end.preempted and pl_module.stop_request is not None:
            lightning_internals.call_module_hook(trainer, "teardown", stage)  # Lightning does not get there
            # All at once: a launcher ends the other processes when the first process ends.
            run.context.distributed.broadcast(None)
            raise errors.Preempted(lightning_internals.choose_exit_code(trainer, pl_module.stop_request.exit_code))


def add_callbacks(trainer: Any) -> None:
    """Put the callbacks of a trial around the callbacks of a trainer, once."""
    if not any(isinstance(callback, TrialGuard) for callback in trainer.callbacks):
        trainer.callbacks.insert(0, TrialGuard())
        trainer.callbacks.append(TrialDriving())
