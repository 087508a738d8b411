"""Saving checkpoints during a run, while the training waits or while it goes on, and retention after each."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.retention.pruning import RunRetention
from det_lightning.checkpoint.storage.background import (
    BackgroundTask,
    Snapshotter,
    all_signals_deferred,
    dead_workers_deferred,
    tensors_in,
)
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.paths import new_id
from det_lightning.checkpoint.storage.writer import CheckpointWriter

logger = logging.getLogger(__name__)


class WrittenCheckpoints:
    """Remembers what a run has written and not deleted, and looks for it.

    Args:
        storage: where it was written to.
    """

    def __init__(self, storage: CheckpointStorage) -> None:
        self._storage = storage
        self._there: list[str] = []
        self._vanished: list[str] = []

    def add(self, checkpoint_id: str) -> None:
        """Remember a complete checkpoint."""
        self._there.append(checkpoint_id)

    def discard(self, checkpoint_ids: Iterable[str]) -> None:
        """Forget what the run itself has deleted."""
        deleted = set(checkpoint_ids)
        self._there = [checkpoint_id for checkpoint_id in self._there if checkpoint_id not in deleted]

    def look(self) -> None:
        """Log an error that names what has vanished since the last time. The training need not end for that.

        Raises:
            StorageError: the storage cannot be read.
        """
        gone = self._storage.find_missing(self._there)
        if gone:
            self.discard(gone)
            self._vanished += gone
            logger.error("%s", _describe(gone, self._storage))

    def require_all(self) -> None:
        """Look for the last time.

        Raises:
            StorageError: checkpoints have vanished during the run; names all of them.
        """
        self.look()
        vanished = self._vanished
        self._vanished = []
        self._there = []
        if vanished:
            raise errors.StorageError(_describe(vanished, self._storage))


def _describe(checkpoint_ids: list[str], storage: CheckpointStorage) -> str:
    return (
        f"{len(checkpoint_ids)} checkpoints that this run has written to {storage} are not there any more: "
        f"{', '.join(checkpoint_ids)}. Was the storage removed or unmounted, or were they deleted by hand? Retention "
        "deletes what need not be kept, and `det-lightning checkpoint prune` what a run has left that is over."
    )


class CheckpointSaver:
    """Writes the checkpoints of one run, one after another.

    Args:
        writer: writes them.
        in_background: copy the state, and write the copy in another thread. At most one is under way.
        retention: decides which ones to keep; None to keep all.
    """

    def __init__(
        self, writer: CheckpointWriter, in_background: bool = False, retention: RunRetention | None = None
    ) -> None:
        self.retention = retention
        self._writer = writer
        self._written = WrittenCheckpoints(writer.storage)
        self._in_background = in_background
        self._snapshotter = Snapshotter()
        self._has_room = False
        self._under_way: BackgroundTask[str] | None = None
        self._complete: list[str] = []

    def expect(self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Make room, while the training begins, for copies of the states of models, and of optimizers once they have
        stepped; nothing if the training waits anyway, or in a second run, which uses the memory of the first."""
        if not self._in_background or self._has_room:
            return
        self._has_room = True
        self._snapshotter.reserve(tensors_in([model.state_dict() for model in models]))
        for optimizer in optimizers:
            self._expect_state(optimizer)

    def _expect_state(self, optimizer: torch.optim.Optimizer) -> None:
        def reserve(*_: Any) -> None:
            hook.remove()
            self._snapshotter.reserve(tensors_in(optimizer.state_dict()))

        # Optimizers around another one often leave out Optimizer.__init__(), and have no hooks.
        with contextlib.suppress(AttributeError):
            hook = optimizer.register_step_post_hook(reserve)

    def save(
        self,
        content: CheckpointContent,
        metric: float | None = None,
        report_written: Callable[[pathlib.Path], None] | None = None,
        checkpoint_id: str | None = None,
    ) -> str:
        """Write a checkpoint, or begin to; return its id.

        Args:
            content: what is written.
            metric: value of the searcher metric of a validation at the same batch.
            report_written: gets the directory before the checkpoint is complete, and may add files to it. The training
                then waits for all but the last step, since a callback may look at the trial as it is now.
            checkpoint_id: the id; by default a new one.

        Raises:
            CheckpointError: this checkpoint, or the one before, cannot be written.
            RuntimeError: a worker of a loader died meanwhile; the checkpoint is written all the same.
        """
        self._collect(wait=True)
        self._written.look()
        checkpoint_id = checkpoint_id or new_id()
        with dead_workers_deferred():
            if not self._in_background:
                self._complete.append(self._write(content, checkpoint_id, metric, report_written))
            elif report_written is None:
                copied = self._copy(content, checkpoint_id)
                self._begin(lambda: self._write(copied, checkpoint_id, metric))
            else:
                self._write_then_commit(content, checkpoint_id, metric, report_written)
        return checkpoint_id

    def note_metric(self, steps_completed: int, metric: float) -> None:
        """Note the metric of a validation for the checkpoint that was written at the same batch, if there is one."""
        if self.retention is not None:
            self._collect(wait=True)
            with dead_workers_deferred():
                self._written.discard(self.retention.note_metric(steps_completed, metric))

    def is_under_way(self) -> bool:
        """Tell whether a checkpoint is being written in the background."""
        return self._under_way is not None and not self._under_way.is_done()

    def finish(self) -> None:
        """End the run: wait for the checkpoint that is under way, and look for all that were written.

        Raises:
            CheckpointError: it cannot be written.
            StorageError: some have vanished; names them.
        """
        self._collect(wait=True)
        self._written.require_all()

    def take_complete(self, wait: bool = False) -> list[str]:
        """Return the ids of the checkpoints that have become complete since the last call.

        Args:
            wait: for the one that is under way.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._collect(wait)
        if wait:
            self._snapshotter.wait()
        complete = self._complete
        self._complete = []
        return complete

    def _collect(self, wait: bool) -> None:
        under_way = self._under_way
        if under_way is None or not (wait or under_way.is_done()):
            return
        under_way.wait()  # where this is interrupted, it is still under way
        with all_signals_deferred():
            self._under_way = None
            self._complete.append(under_way.result())

    def _begin(self, write: Callable[[], str]) -> None:
        with all_signals_deferred():
            self._under_way = BackgroundTask(write, name="checkpoint")

    def _copy(self, content: CheckpointContent, checkpoint_id: str) -> CheckpointContent:
        try:
            copied: CheckpointContent = self._snapshotter.copy(content, content.copies)
        except (RuntimeError, pickle.PicklingError, AttributeError, TypeError) as e:
            raise errors.CheckpointError(
                f"Checkpoint {checkpoint_id} cannot be written: its state cannot be copied: {e}."
            ) from e
        return copied

    def _write(
        self,
        content: CheckpointContent,
        checkpoint_id: str,
        metric: float | None,
        report_written: Callable[[pathlib.Path], None] | None = None,
    ) -> str:
        self._writer.write(content, checkpoint_id, report_written)
        return self._keep(content, checkpoint_id, metric)

    def _write_then_commit(
        self,
        content: CheckpointContent,
        checkpoint_id: str,
        metric: float | None,
        report_written: Callable[[pathlib.Path], None],
    ) -> None:
        staging = self._writer.write_files(content, checkpoint_id, report_written)

        def commit() -> str:
            self._writer.commit(content, staging)
            return self._keep(content, checkpoint_id, metric)

        self._begin(commit)

    def _keep(self, content: CheckpointContent, checkpoint_id: str, metric: float | None) -> str:
        self._written.add(checkpoint_id)
        if self.retention is not None:
            deleted = self.retention.note_written(checkpoint_id, content.trial_state.batches_trained, metric)
            self._written.discard(deleted)
        return checkpoint_id
