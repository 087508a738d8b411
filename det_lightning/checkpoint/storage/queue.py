"""Writing checkpoints one after another, at once or while training goes on."""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.code_copy import CodeCopier
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.storage.background import (
    WORKER_DIED,
    BackgroundTask,
    Snapshotter,
    all_signals_deferred,
    signal_deferred,
    tensors_in,
)
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import new_id
from det_lightning.checkpoint.storage.staging import StagingDirectory
from det_lightning.checkpoint.storage.writing import ReportWritten

logger = logging.getLogger(__name__)


class CheckpointQueue:
    """Writes checkpoints into a storage, one after another; if ``in_background``, copies of them in another thread.

    An error in the background is raised once, by the next call.
    """

    def __init__(self, storage: CheckpointStorage, code: CodeCopier | None = None, in_background: bool = False) -> None:
        self._storage = storage
        self._code = code or CodeCopier()
        self._in_background = in_background
        self._snapshotter = Snapshotter()
        self._is_reserved = False
        self._under_way: BackgroundTask[str] | None = None
        self._complete: list[str] = []  # ids that take_complete() has not returned yet
        self._hurries = False

    def limit_retries_when(self, is_ending: Callable[[], bool]) -> None:
        """Once ``is_ending()`` is true, try a failing transfer only once more, after a second at most."""
        self._storage.limit_retries_when(lambda: self._hurries or is_ending())

    def reserve_memory(self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Reserve memory for copies of the states of models, and of optimizers once they have stepped.

        Nothing is reserved if training waits for the writing anyway, or in a second run, which reuses the memory.
        """
        if not self._in_background or self._is_reserved:
            return
        self._is_reserved = True
        self._snapshotter.reserve(tensors_in([model.state_dict() for model in models]))
        for optimizer in optimizers:
            self._expect_state(optimizer)

    def _expect_state(self, optimizer: torch.optim.Optimizer) -> None:
        def reserve(*_: Any) -> None:
            hook.remove()
            self._snapshotter.reserve(tensors_in(optimizer.state_dict()))

        # Optimizers that wrap another one often skip Optimizer.__init__(), and then have no hooks.
        with contextlib.suppress(AttributeError):
            hook = optimizer.register_step_post_hook(reserve)

    def write(
        self,
        content: CheckpointContent,
        checkpoint_id: str | None = None,
        report_written: ReportWritten | None = None,
        commit: Callable[[StagingDirectory], str] | None = None,
    ) -> str:
        """Write a checkpoint once the previous one is complete, or start writing it; return its id.

        With ``report_written``, which may look at the trial, only :meth:`CheckpointStorage.commit` is left to the
        background. ``commit``, by default that method, is called with the staging directory and returns the id.

        Raises:
            CheckpointError: this checkpoint or the previous one cannot be written.
            RuntimeError: a loader's worker died meanwhile; the checkpoint is written nevertheless.
        """
        if self._under_way is not None:
            self.wait()
        new = checkpoint_id or new_id()
        publish = commit or self._storage.commit
        with signal_deferred(WORKER_DIED):
            if self._in_background and report_written is None:
                complete = functools.partial(self._write_copied, self._copy(content, new), new, publish)
            else:
                staging = self._storage.begin(new, content, self._code, report_written)
                complete = functools.partial(publish, staging)
            if self._in_background:
                with all_signals_deferred():
                    self._under_way = BackgroundTask(complete, name="checkpoint")
            else:
                self._complete.append(complete())
        return new

    def is_under_way(self) -> bool:
        """Return whether a checkpoint is being written in the background."""
        return self._under_way is not None and not self._under_way.is_done()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; raise its error."""
        if (under_way := self._under_way) is not None:
            under_way.wait()  # if this is interrupted, it stays under way
            with all_signals_deferred():
                self._under_way = None
                self._complete.append(under_way.result())

    def take_complete(self, wait: bool = False) -> list[str]:
        """Return the ids of the checkpoints that have become complete since the last call, or raise their errors.

        If ``wait``, wait for the one that is being written.
        """
        if self._under_way is not None and (wait or self._under_way.is_done()):
            self.wait()
        if wait:
            self._snapshotter.wait()
        complete = self._complete
        self._complete = []
        return complete

    def finish_in_a_hurry(self) -> list[str]:
        """Wait for the checkpoint that is being written; return the ids of those that have become complete."""
        self._hurries = True
        if self.is_under_way():
            logger.warning("A checkpoint is being written; the process waits for it. Ctrl-C would give it up.")
        try:
            return self.take_complete(wait=True)
        finally:
            self._hurries = False  # the storage may be used by another run

    def _copy(self, content: CheckpointContent, checkpoint_id: str) -> CheckpointContent:
        try:
            return self._snapshotter.copy(content, content.copies)
        except (RuntimeError, pickle.PicklingError, AttributeError, TypeError) as e:
            raise errors.CheckpointError(
                f"Checkpoint {checkpoint_id} cannot be written: its state cannot be copied: {e}."
            ) from e

    def _write_copied(
        self, copied: CheckpointContent, checkpoint_id: str, publish: Callable[[StagingDirectory], str]
    ) -> str:
        self._snapshotter.wait_for_device()
        return publish(self._storage.begin(checkpoint_id, copied, self._code))
