"""``RunDriver``: trains batches in Lightning's steps; reports, validates, saves and stops at boundaries."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch

from det_lightning import errors
from det_lightning.adapters import flags, lightning_internals, lightning_loops
from det_lightning.adapters.hooks import DrivenModule, WatchedHooks
from det_lightning.adapters.lightning_loops import TrialCalls
from det_lightning.adapters.lightning_package import pl
from det_lightning.adapters.reporting import LightningReporter
from det_lightning.core._task import current_task
from det_lightning.engine.boundary import all_ranks_end, interrupts_end_the_process
from det_lightning.engine.checkpointing import RunCheckpoints
from det_lightning.engine.data_stream import LoaderFactory
from det_lightning.engine.run import TrialRun
from det_lightning.engine.schedule import Action
from det_lightning.escaping import get_logger
from det_lightning.tracebacks import shorten_traceback

logger = get_logger(__name__)

_BAR_INTERVAL_S = 0.1


class StopIterationGuard:
    """Turns a ``StopIteration`` of trial code into a ``RuntimeError``; Lightning would take it for the end of the data.

    It is a class because ``contextlib.contextmanager`` would raise the ``StopIteration`` again.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StopIteration):
            raise RuntimeError(
                "The trial or one of its callbacks raised StopIteration (a next() on an iterator that has ended?); "
                "see the exception above."
            ) from error


@contextlib.contextmanager
def _end_run_on_invalid_hp() -> Iterator[None]:
    """Turn an ``InvalidHP`` from a hook during a checkpoint into a ``ShouldExit`` without another checkpoint."""
    try:
        yield
    except errors.InvalidHP as e:
        logger.warning("A callback gave up on the hyperparameters while a checkpoint was saved: %s", e)
        raise errors.ShouldExit(skip_exit_checkpoint=True) from e


class BarRefresh:
    """Draws the progress bars of a trainer at most ten times a second, through documented hooks.

    Attributes:
        any_on_a_rank: some rank draws bars; only the first one does.
        any_drawn: this rank draws bars.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        callbacks: list[pl.Callback] = getattr(trainer, "callbacks")  # noqa: B009 (set by a connector; mypy)
        self._trainer = trainer
        bars = [callback for callback in callbacks if isinstance(callback, pl.callbacks.ProgressBar)]
        self.any_on_a_rank = bool(bars)
        self._bars = [bar for bar in bars if getattr(bar, "is_enabled", True)]
        self.any_drawn = bool(self._bars)
        self._next_s = time.monotonic() + _BAR_INTERVAL_S

    def is_due(self) -> bool:
        """Return whether a tenth of a second has passed since bars were drawn."""
        return time.monotonic() >= self._next_s

    def draw(self, hook: str, batches: int) -> None:
        """Call the ``hook`` of each bar for the end of a batch, with the number of finished batches."""
        self._next_s = time.monotonic() + _BAR_INTERVAL_S
        for bar in self._bars:
            # tqdm's bar is drawn only at multiples of the refresh rate.
            rate = bar.refresh_rate if isinstance(bar, pl.callbacks.TQDMProgressBar) else 1
            if batches >= rate:
                shown = batches - batches % rate
                getattr(bar, hook)(self._trainer, self._trainer.lightning_module, None, None, shown - 1)


class RunDriver:
    """Runs a trial from Lightning's hooks: ends steps, and reports, validates, saves and stops at boundaries."""

    def __init__(
        self,
        trainer: pl.Trainer,
        run: TrialRun,
        checkpoints: RunCheckpoints | None,
        hooks: WatchedHooks,
        reporter: LightningReporter,
        validates_at_step_zero: bool,
    ) -> None:
        self.run = run
        self._validates_at_step_zero = validates_at_step_zero
        self._hooks = hooks
        self._reporter = reporter
        self._trainer = trainer
        self._bars = BarRefresh(trainer)
        self._checkpoints = checkpoints
        self._validation_metrics: dict[str, Any] = {}
        self._fetched: list[Any] = []
        self._users_max_epochs = trainer.max_epochs
        self._max_steps = sys.maxsize

    def start_up(self, loaders: LoaderFactory, calls: TrialCalls) -> None:
        """Begin a run with a factory's loaders; Lightning's loops make the ``calls`` and show batches to callbacks."""
        run = self.run
        if run.schedule.max_length is not None:
            lightning_internals.limit_epochs(self._trainer, -1)
        run.start_up(loaders)
        self._hooks.attach(run.context)
        if self._hooks.see_training_batches:
            calls = dataclasses.replace(calls, next_batch=self._next_training_batch)
        if self._hooks.see_validation_batches and run.evaluation.by_batch:
            calls = dataclasses.replace(calls, begin_validation=self._begin_validation)
        lightning_loops.use_calls(self._trainer, calls)

    def begin_training(self) -> None:
        """Load the checkpoint, set Lightning's counters, and validate if a validation is due before the first batch."""
        trainer = self._trainer
        run = self.run
        run.begin_training()
        if (epochs := run.schedule.count_epochs(run.state, run.data.epoch_len)) is not None:
            # Not earlier: a complete run may still have to validate or save.
            lightning_internals.limit_epochs(trainer, epochs)
        lightning_internals.move_to(trainer, run.state, run.context.optimizer_steps)
        lightning_internals.move_to_epoch(trainer, run.state.epochs_trained)
        lightning_loops.allow_validation(trainer, due=False)
        step_zero = self._validates_at_step_zero and run.state.batches_trained == 0
        if (step_zero and trainer.enable_validation) or self.run_due_actions():
            lightning_internals.run_validation(trainer)
        lightning_internals.show_logging_step(trainer, run.state.batches_trained + 1)

    def _next_training_batch(self) -> tuple[Any, int]:
        """Return the batch of the next step, on the device, and its index in the epoch; the batch may be None."""
        run = self.run
        if not self._fetched:  # a hook may have skipped a step
            self._fetched = [*itertools.islice(run.data.prepare(run.data.training.batches), 1)]
        batch = self._fetched[0] if self._fetched else None
        return batch, run.state.batches_trained % run.data.epoch_len

    def train(self, dataloader_iter: Iterator[Any]) -> dict[str, Any] | None:
        """Train to the end of the step, past boundaries that only report; or on one batch, and return its metrics."""
        run = self.run
        if run.state.batches_trained == 0 and not run.has_validated:
            flags.warn_of_evaluation_mode(part for model in run.context.models for part in model.modules())
        self._max_steps = self._trainer.max_steps if self._trainer.max_steps != -1 else sys.maxsize
        if self._trainer.should_stop:  # once it may
            self._max_steps = min(self._max_steps, self._trainer.min_steps or sys.maxsize)
        if self._hooks.see_training_batches:
            fetched = self._fetched
            self._fetched = []
            self._train_on(iter(fetched), lambda: True)
        else:
            # Not from Lightning's iterator: keeping batches for callbacks costs more than anything else per batch.
            batches = run.data.prepare(run.data.training.batches)
            self._train_on(batches, self._ends_training_step)
            while self._passes_boundary():
                self._train_on(batches, self._ends_training_step, first=False)
        outputs = run.training.window.take_latest()
        if (self._hooks.see_training_batches or run.at_epoch_end()) and not run.at_boundary():
            # Callbacks may look at metrics now, and no report follows.
            lightning_internals.publish_metrics(self._trainer, run.training.window.means())
        if run.early_end.is_immediate(run.at_boundary()):
            lightning_internals.end_training(self._trainer, early=True)
        ends_here = self._lightning_ends_here()
        if run.at_boundary() or ends_here:
            run.end_workload()
        if not self._hooks.see_training_batches:
            latest = (run.state.batches_trained - 1) % run.data.epoch_len
            lightning_loops.show_batch_index(dataloader_iter, latest)
        if run.at_epoch_end():
            lightning_internals.end_epoch(dataloader_iter)
        return outputs

    def _train_on(self, batches: Iterator[Any], yields: Callable[[], bool], first: bool = True) -> None:
        """Train up to a boundary; Lightning itself counts the ``first`` batch of a step."""
        run = self.run
        trained = run.train(batches, yields)
        lightning_internals.move_to(self._trainer, run.state, run.context.optimizer_steps, trained - int(first))

    def _passes_boundary(self) -> bool:
        """If only a report is due, report within the step, which saves ending it. Return whether the step goes on."""
        run = self.run
        if self._bars.any_on_a_rank or not run.only_reports():
            return False
        if self._ends_training_step() or self._lightning_ends_here():
            return False
        run.end_workload()
        if self._checkpoints is not None:
            with _end_run_on_invalid_hp():
                self._checkpoints.report_complete()
        return run.continues() and not self._trainer.should_stop  # a logger may have set the flag

    def _ends_training_step(self) -> bool:
        """Return whether the step ends after a batch that is no boundary. The answer is the same in equal runs."""
        run = self.run
        if self._bars.any_drawn and self._bars.is_due():
            self._bars.draw("on_train_batch_end", run.state.batches_trained % run.data.epoch_len)
        early_end = run.early_end
        # Several ranks agree on a request to end at the next boundary.
        if run.context.optimizer_steps >= self._max_steps or (early_end.is_alone and early_end.stop_request.requested):
            return True
        # Set by Lightning's own handler of SIGTERM, if nothing else handles the signal.
        return self._trainer.received_sigterm

    def _lightning_ends_here(self) -> bool:
        trainer = self._trainer
        run = self.run
        steps_done = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        max_epochs = trainer.max_epochs
        epochs_done = run.at_epoch_end() and max_epochs not in (None, -1) and run.state.epochs_trained >= max_epochs
        return bool(steps_done or epochs_done or trainer.should_stop)

    def evaluate(self, dataloader_iter: Any) -> dict[str, Any] | None:
        """Evaluate the validation data; or one batch, and return the metrics of the batch."""
        run = self.run
        over = True
        if not run.evaluation.by_batch:
            run.evaluation.evaluate_full_dataset(run.data.validation.loader)
        elif self._hooks.see_validation_batches:
            batch = lightning_loops.get_shown_batch(dataloader_iter)
            over = run.evaluation.evaluate(iter([batch]), lambda: True) or dataloader_iter.done
        else:
            # Not from Lightning's iterator: nothing else costs as much per batch.
            limit = lightning_loops.read_validation_limit(self._trainer, dataloader_iter)
            draws = self._draw_validation_bar if self._bars.any_drawn else None
            run.evaluation.evaluate(self._begin_validation(limit), draws)
            lightning_loops.show_batch_index(dataloader_iter, run.evaluation.batches_evaluated - 1)
        if over:
            if run.evaluation.by_batch and not run.schedule.test_mode:
                run.data.run_out_validation(run.evaluation.batches_evaluated)
            lightning_internals.end_epoch(dataloader_iter)
        return run.evaluation.window.take_latest()

    def _begin_validation(self, limit: int | None) -> Iterator[Any]:
        data = self.run.data
        return map(data.prepare_batch, itertools.islice(data.validation.begin(), limit))

    def _draw_validation_bar(self) -> bool:
        if self._bars.is_due():
            self._bars.draw("on_validation_batch_end", self.run.evaluation.batches_evaluated)
        return False

    @_end_run_on_invalid_hp()
    def run_due_actions(self) -> bool:
        """Report, save and stop up to a validation; return whether Lightning must validate now."""
        # A callback of Lightning, such as its Timer, may end the run, which then validates first.
        state = self.run.state
        is_over = self.run.early_end.preempted or state.last_val == state.batches_trained
        validates_at_stop = not is_over and lightning_internals.validates_at_stop(self._trainer)
        if self._checkpoints is not None:
            self._checkpoints.report_complete()
        while (action := self.run.next_action()) is not None:
            if action is Action.VALIDATE:
                if self._trainer.enable_validation:
                    return True
            elif action is Action.STOP:
                validates_at_stop = False
                lightning_internals.end_training(self._trainer, early=self.run.early_end.preempted)
            elif self._checkpoints is not None:
                self._checkpoints.save()
        if validates_at_stop:
            self.run.end_workload()
            self.run.keep_state_before_validation()
        return validates_at_stop

    def run_due_actions_after_step(self) -> None:
        """Report, save or stop after a step of Lightning, and let Lightning validate if a validation is due."""
        lightning_internals.save_by_time(self._trainer)
        lightning_loops.allow_validation(self._trainer, due=self.run_due_actions())

    def end_validation_epoch(self) -> None:
        """Reduce and report the metrics of the validation."""
        self._validation_metrics = self.run.end_validation()

    @_end_run_on_invalid_hp()
    def act_after_validation(self) -> None:
        """Save by the policy, then continue with the actions of the boundary."""
        if self._checkpoints is not None:
            self._checkpoints.save_after_validation(self._validation_metrics)
        # Lightning's validation is not over yet: a checkpoint by policy is part of the validation, the rest is not.
        with torch.enable_grad():
            self.run_due_actions()

    @_end_run_on_invalid_hp()
    def finish(self) -> None:
        """Report and save the rest after the last batch."""
        self.run.end_workload()
        if self._checkpoints is not None:
            self._checkpoints.save_unless_current()
            self._checkpoints.finish()

    def abandon(self, exception: BaseException) -> None:
        """End a failed run; save first if all ranks end by an exception that asks for a checkpoint."""
        saves = isinstance(exception, errors.InvalidHP) or (
            isinstance(exception, errors.ShouldExit) and not exception.skip_exit_checkpoint
        )
        distributed = self.run.context.distributed
        for given_up in (exception, exception.__cause__):
            if isinstance(given_up, errors.InvalidHP):
                distributed.give_up(given_up)
        try:
            if self._checkpoints is not None:
                if saves and all_ranks_end(distributed, exception):
                    self._checkpoints.save_unless_current()
                # After a KeyboardInterrupt, Lightning ignores any further Ctrl-C.
                interrupted = isinstance(exception, KeyboardInterrupt)
                with interrupts_end_the_process() if interrupted else contextlib.nullcontext():
                    self._checkpoints.abandon(exception)
        finally:
            self.close()

    def close(self) -> None:
        """Release the trainer and the loaders, and end the run's callbacks."""
        if self._users_max_epochs is not None:
            lightning_internals.limit_epochs(self._trainer, self._users_max_epochs)
        lightning_loops.use_calls(self._trainer, TrialCalls())
        lightning_loops.allow_validation(self._trainer, None)
        if self._checkpoints is not None:
            self._checkpoints.close()
        self.run.shut_down()
        self._reporter.log_initial()


def _has_trial(module: pl.LightningModule) -> TypeGuard[Any]:
    """Return whether a module is a ``TrialModule``, whose file imports this one."""
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
        """End the run. Outside of experiments and of ``init()``, which does the same, shorten the traceback."""
        if _has_trial(pl_module):
            pl_module.abandon(exception)
            if pl_module.trial_builder.owns_context and current_task() is None:
                shorten_traceback(exception)


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
