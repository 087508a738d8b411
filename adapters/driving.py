"""The callbacks in which a trainer drives a trial, so that subclasses of its module may override any hook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from det_lightning import errors
from det_lightning.adapters import flags, lightning_internals
from det_lightning.adapters.driver import StopIterationGuard
from det_lightning.adapters.hooks import DrivenModule
from det_lightning.adapters.lightning_package import pl


class _OfTrials(pl.Callback):
    """Leaves modules without a trial alone, as a trainer may be used for several modules."""

    @staticmethod
    def of(module: pl.LightningModule) -> Iterator[Any]:
        """Yield the module if it is a ``TrialModule``, which imports this file."""
        if isinstance(module, DrivenModule):
            yield module


class TrialGuard(_OfTrials):
    """Builds the trial before other callbacks look at the module, and ends its run after an exception."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for module in self.of(pl_module):
            flags.refuse_unsupported_callbacks(trainer)  # also those that the module has configured
            put_last(trainer)
            module.build_trial()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        for module in self.of(pl_module):
            module.abandon(exception)


class TrialDriving(_OfTrials):
    """Runs the trial from the hooks of a trainer, after all other callbacks and before the module's own hooks.

    The loops of ``lightning_loops`` call what comes after the module's hooks.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for module in self.of(pl_module):
            module.require_same("configure_optimizers", trainer.strategy.optimizers)
            module.start_trial_run()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for module in self.of(pl_module):
            module.require_same("train_dataloader", [trainer.train_dataloader])
            module.begin_training()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for module in self.of(pl_module):
            module.running_driver().finish()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for module in self.of(pl_module):
            module.require_same("val_dataloader", [trainer.val_dataloaders])
            with StopIterationGuard():
                module.trial_run.begin_validation()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for module in self.of(pl_module):
            with StopIterationGuard():
                module.running_driver().end_validation_epoch()

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for module in self.of(pl_module):
            module.begin_prediction()

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for module in self.of(pl_module):
            module.end_evaluation()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for module in self.of(pl_module):
            module.begin_test()

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for module in self.of(pl_module):
            module.end_test_epoch()

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for module in self.of(pl_module):
            module.end_evaluation()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the run; raise ``Preempted`` if a process of it was asked to end, and everything is saved."""
        for module in self.of(pl_module):
            module.restore_flags()
            if module.driver is None:
                continue
            module.driver.close()
            run = module.driver.run
            if run.early_end.preempted and module.stop_request is not None:
                lightning_internals.call_module_hook(trainer, "teardown", stage)  # which Lightning does not reach
                # All at once, because a launcher ends the other processes when the first one ends.
                run.context.distributed.broadcast(None)
                raise errors.Preempted(lightning_internals.exit_code_of(trainer, module.stop_request.exit_code))


def add_callbacks(trainer: pl.Trainer) -> None:
    """Put the callbacks that drive a trial around those of a trainer, once."""
    callbacks = _callbacks_of(trainer)
    if not any(isinstance(callback, TrialGuard) for callback in callbacks):
        callbacks.insert(0, TrialGuard())
        callbacks.append(TrialDriving())


def put_last(trainer: pl.Trainer) -> None:
    """Put the callback that drives the trial behind those that the module has configured."""
    trainer.callbacks = sorted(_callbacks_of(trainer), key=lambda one: isinstance(one, TrialDriving))  # type: ignore[attr-defined]


def _callbacks_of(trainer: Any) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = trainer.callbacks  # set by a connector, which mypy does not see
    return callbacks
