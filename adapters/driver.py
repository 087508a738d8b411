"""Driving the run of a trial from within Lightning's loops."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytorch_lightning as pl
import torch

from det_lightning import errors
from det_lightning.adapters import flags, lightning_internals
from det_lightning.adapters.progress import BarRefresh
from det_lightning.engine.boundary import Action
from det_lightning.engine.run import TrialRun
from det_lightning.engine.signals import interrupts_end_the_process
from det_lightning.units import TrainUnit

logger = logging.getLogger(__name__)

# All ranks come to the same end at about the same time, if they do.
_MEETING_TIME_S = 10.0


def _always() -> bool:
    return True


class StopIterationGuard:
    """Turns a ``StopIteration`` of trial code into a ``RuntimeError``.

    Lightning's loops take a ``StopIteration`` for the end of the data, and would train on without an end.
    """

    def __enter__(self) -> None:
        """Begin to watch."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raise a ``RuntimeError`` in place of a ``StopIteration``."""
        if isinstance(error, StopIteration):
            raise RuntimeError(
                "The trial or one of its callbacks raised StopIteration (a next() on an iterator that has ended?); "
                "see the exception above."
            ) from error


class Checkpointer(Protocol):
    """Writes checkpoints of a run when it is asked to; see ``det_lightning.callbacks.DeterminedCheckpoint``."""

    @property
    def period(self) -> TrainUnit | None:
        """When checkpoints are due, besides those that follow a validation."""

    def save(self, run: TrialRun) -> None:
        """Write a checkpoint."""

    def save_after_validation(self, run: TrialRun, metrics: dict[str, Any]) -> None:
        """Write a checkpoint if the policy wants one after a validation with these metrics."""

    def report_complete(self, run: TrialRun, wait: bool = False) -> None:
        """Tell the trial of checkpoints that have become complete; raise where one cannot be written."""

    def finish(self, run: TrialRun) -> None:
        """Wait, on every rank, until all is written; raise where a checkpoint cannot be written or has vanished."""

    def abandon(self, run: TrialRun) -> None:
        """Finish on this rank what is under way, when the run has failed."""

    def close(self) -> None:
        """Give up what the run claims in the storage; called at its end, however it ended."""


@contextlib.contextmanager
def _invalid_hp_ends_the_run() -> Iterator[None]:
    """Make an ``InvalidHP`` of a hook that is told of a checkpoint end the run, without the checkpoint and an error."""
    try:
        yield
    except errors.InvalidHP as e:
        logger.warning("A callback gave up on the hyperparameters while a checkpoint was saved: %s", e)
        raise errors.ShouldExit(skip_exit_checkpoint=True) from e


class RunDriver:
    """Does what is due at the boundaries of a run, and says when Lightning has to take its turn.

    Args:
        trainer: Lightning's.
        run: what is driven.
        checkpointer: what writes checkpoints; None to write none.

    Attributes:
        shows_each_batch: a callback has to see every training batch, so that a step holds just one.
    """

    def __init__(self, trainer: pl.Trainer, run: TrialRun, checkpointer: Checkpointer | None) -> None:
        self.run = run
        self.shows_each_batch = flags.needs_each_batch(trainer, "train")
        self._shows_each_validation_batch = flags.needs_each_batch(trainer, "validation")
        self._trainer = trainer
        self._bars = BarRefresh(trainer)
        self._checkpointer = checkpointer
        self._validation_metrics: dict[str, Any] = {}
        self._users_flag = trainer.check_val_every_n_epoch

    def ends_training_step(self) -> Callable[[], bool]:
        """Return what is asked after each batch: whether the step has to end though no boundary was reached.

        Unless the process is asked to end, the answers depend on the data and the flags only: equal runs take equal
        steps.
        """
        if self.shows_each_batch:
            return _always
        context = self.run.context
        state = self.run.state
        stop_request = self.run.early_end.stop_request
        # Several ranks agree on it at the next boundary.
        is_alone = self.run.early_end.is_alone
        trainer = self._trainer
        bars = self._bars
        max_steps = self._trainer.max_steps if self._trainer.max_steps != -1 else sys.maxsize
        epoch_len = context.position.epoch_length()

        def ends() -> bool:
            if bars.any_drawn and bars.is_due():
                bars.draw_training(state.batches_trained % epoch_len)
            if context.optimizer_steps >= max_steps or (is_alone and stop_request.requested):
                return True
            # Lightning's own handler of SIGTERM, where nothing else handles it.
            return trainer.received_sigterm

        return ends

    def ends_validation_step(self) -> Callable[[], bool]:
        """Return the same for validation batches."""
        if self._shows_each_validation_batch:
            return _always
        evaluation = self.run.evaluation
        bars = self._bars

        def ends() -> bool:
            if bars.any_drawn and bars.is_due():
                bars.draw_validation(evaluation.batches_evaluated)
            return False

        return ends

    @_invalid_hp_ends_the_run()
    def act(self) -> bool:
        """Do what is due up to a validation; tell whether Lightning has to validate now."""
        if self._checkpointer is not None:
            self._checkpointer.report_complete(self.run)
        while (action := self.run.next_action()) is not None:
            if action is Action.VALIDATE:
                if self._trainer.enable_validation:
                    return True
            elif action is Action.STOP:
                lightning_internals.end_training(self._trainer, early=self.run.early_end.preempted)
            elif self._checkpointer is not None:
                self._checkpointer.save(self.run)
        return False

    def end_step(self, trained: int) -> None:
        """Note the end of a step of ``trained`` batches; end the workload where there is a boundary."""
        run = self.run
        lightning_internals.move_to(self._trainer, run.state, run.context.optimizer_steps, extra_batches=trained - 1)
        if run.early_end.must_come_now(run.at_boundary()):
            lightning_internals.end_training(self._trainer, early=True)
        if run.at_boundary() or self._lightning_ends_here():
            run.end_workload()

    def _lightning_ends_here(self) -> bool:
        """Tell whether ``max_steps``, ``max_epochs`` or a callback end the training after this step."""
        trainer = self._trainer
        run = self.run
        steps_done = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        max_epochs = trainer.max_epochs
        epochs_done = run.at_epoch_end() and max_epochs not in (None, -1) and run.state.epochs_trained >= max_epochs
        return bool(steps_done or epochs_done or trainer.should_stop)

    def end_validation_epoch(self) -> None:
        """Reduce and report the metrics of a validation."""
        self._validation_metrics = self.run.end_validation()

    @_invalid_hp_ends_the_run()
    def act_after_validation(self) -> None:
        """Save if the policy wants it, then do what is left to do at the boundary."""
        if self._checkpointer is not None:
            self._checkpointer.save_after_validation(self.run, self._validation_metrics)
        # Lightning's validation is not over yet. A checkpoint by policy belongs to it, the others do not.
        with torch.enable_grad():
            self.act()

    @_invalid_hp_ends_the_run()
    def finish(self) -> None:
        """Report and save what is left, however the training ended."""
        self.run.end_workload()
        self._save_unsaved()
        if self._checkpointer is not None:
            self._checkpointer.finish(self.run)

    def abandon(self, exception: BaseException) -> None:
        """End the run after an exception; save what was trained if the trial itself wanted to end."""
        saves = isinstance(exception, errors.InvalidHP) or (
            isinstance(exception, errors.ShouldExit) and not exception.skip_exit_checkpoint
        )
        try:
            if saves and self._all_ranks_end():
                self._save_unsaved()
            self._settle_after(exception)
        finally:
            self.close()

    def _all_ranks_end(self) -> bool:
        """Tell whether all ranks end with such an error; one that does so alone would wait for the others in vain."""
        distributed = self.run.context.distributed
        came = threading.Event()
        if distributed.size == 1:
            return True

        def meet() -> None:
            # Not an allgather: ranks that go on may be in one, and would take this for their own.
            with contextlib.suppress(RuntimeError):
                distributed.gather(None)
                came.set()

        threading.Thread(target=meet, name="det_lightning-meeting", daemon=True).start()
        if not came.wait(_MEETING_TIME_S):
            logger.error("Not all ranks end the run, so what was trained since the latest checkpoint is not saved.")
        return came.is_set()

    def _settle_after(self, exception: BaseException) -> None:
        """Wait for a checkpoint that is under way; what ended the run is not to be hidden by its failure."""
        if self._checkpointer is None:
            return
        # A KeyboardInterrupt means that Lightning ignores what comes after it.
        interrupted = isinstance(exception, KeyboardInterrupt)
        try:
            with interrupts_end_the_process() if interrupted else contextlib.nullcontext():
                self._checkpointer.abandon(self.run)
        except errors.CheckpointError as e:
            if e is not exception:
                logger.error("The checkpoint that was under way when the run failed is lost: %s", e)

    def close(self) -> None:
        """End the run, and leave the trainer's flags as the user had set them."""
        self._trainer.check_val_every_n_epoch = self._users_flag
        if self._checkpointer is not None:
            self._checkpointer.close()
        self.run.shut_down()

    def _save_unsaved(self) -> None:
        if self._checkpointer is not None and not self.run.checkpoint_is_current():
            self._checkpointer.save(self.run)
