"""The checkpoints of a run: saving them, at once or in the background, the name of its trial, and retention."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.digests import digest_file
from det_lightning.checkpoint.format.layout import LIGHTNING_FILE, RESUME_FILE, SHARDED_STATE_FILE, STATE_FILE
from det_lightning.checkpoint.retention.pruning import RunRetention
from det_lightning.checkpoint.retention.rule import Retention
from det_lightning.checkpoint.retention.run_claims import BackgroundCleaning, RunClaims
from det_lightning.checkpoint.retention.trial_index import TrialIndex
from det_lightning.checkpoint.storage.background import (
    WORKER_DIED,
    BackgroundTask,
    Snapshotter,
    all_signals_deferred,
    signal_deferred,
    tensors_in,
)
from det_lightning.checkpoint.storage.location import new_id
from det_lightning.checkpoint.storage.staging import StagingDirectory
from det_lightning.checkpoint.storage.writer import CheckpointWriter
from det_lightning.checkpoint.unreadable import UnreadableValues, parts_of

logger = logging.getLogger(__name__)

# The files that hold what users' code returns; the others hold numbers, texts and tensors only.
_FILES_WITH_OBJECTS = (STATE_FILE, SHARDED_STATE_FILE, RESUME_FILE, LIGHTNING_FILE)


@dataclasses.dataclass(eq=False)
class CheckpointSaver:
    """Claims the name of a trial; writes the checkpoints of its runs, one after another; deletes what need not be kept.

    If ``in_background``, it copies the state and writes the copy in another thread, one checkpoint at a time. The other
    arguments are explained in ``DeterminedCheckpoint``.
    """

    writer: CheckpointWriter
    in_background: bool = False
    metric: str | None = None
    smaller_is_better: bool = True
    retention: Retention | None = None
    experiment: str | None = None
    trial: str | None = None
    job: str | None = None

    def __post_init__(self) -> None:
        self.storage = self.writer.storage
        self.claims = RunClaims(self.storage)
        # What the metadata of a run's checkpoints say about the run.
        self._notes: dict[str, Any] = {}
        self._run_retention: RunRetention | None = None
        self._cleaning: BackgroundCleaning | None = None
        self._snapshotter = Snapshotter()
        self._unreadable: UnreadableValues | None = None  # until the first checkpoint of a run
        #: If not None, the SHA-256 of state files with objects is noted here, by the ids of their checkpoints.
        self.digests: dict[str, list[str]] | None = None
        self._is_reserved = False
        self._under_way: BackgroundTask[str] | None = None
        self._hurries = False
        # Ids of complete checkpoints: not yet returned, still in the storage, vanished from it.
        self._complete: list[str] = []
        self._existing: list[str] = []
        self._vanished: list[str] = []

    def begin(self, path: str | os.PathLike[str] | None, resumed: CheckpointContent | None) -> None:
        """Claim the trial's name, and start a background thread that removes what killed runs have left behind.

        ``path`` is the path or URL of the checkpoint that the run resumes from, and ``resumed`` its content.
        """
        self._unreadable = None
        storage = self.storage
        storage.require_writable()
        inherited = None if resumed is None or resumed.resume is None else resumed.resume.trial
        trial = self.claims.claim_trial(self.experiment, self.trial, inherited)
        parent = (resumed.name or None) if resumed is not None else None
        experiment = self.experiment or trial
        self._notes = {"trial": trial, "experiment": experiment, **self.claims.trace_back(path, parent)}
        if self.job is not None:
            self._notes["job"] = self.job
        if self.retention is not None:
            read = functools.partial(TrialIndex, storage.root, experiment, trial, self.metric, self.smaller_is_better)
            index = storage.retry.call("reading", read, where=storage)
            self._run_retention = RunRetention(storage, index, self.retention, self.claims.run_id)
            self._run_retention.catch_up(parent)
        self._cleaning = BackgroundCleaning(storage)

    def end(self) -> None:
        """Release the name of the trial, and whatever keeps others from deleting checkpoints."""
        if self._cleaning is not None:
            self._cleaning.end()
            self._cleaning = None
        self.claims.release()

    def limit_retries_when(self, is_ending: Callable[[], bool]) -> None:
        """Once ``is_ending()`` is true, try a failing transfer only once more, after a second at most."""
        self.storage.limit_retries_when(lambda: self._hurries or is_ending())

    def reserve_memory(self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Reserve memory for copies of the states of models, and of optimizers once they have stepped.

        Nothing is reserved if training waits for the writing anyway, or in a second run, which reuses the memory.
        """
        if not self.in_background or self._is_reserved:
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

    def save(
        self,
        content: CheckpointContent,
        metric: float | None = None,
        report_written: Callable[[pathlib.Path], None] | None = None,
        checkpoint_id: str | None = None,
    ) -> str:
        """Write a checkpoint, or start writing it; return its id.

        ``metric`` comes from a validation at the same batch. ``report_written`` is called with the directory before the
        checkpoint is complete, and may add files. Training then waits for all but the last step, since a callback may
        look at the current trial. Raise a ``CheckpointError`` if this checkpoint or the previous one cannot be written,
        and a ``RuntimeError`` if a loader's worker died meanwhile; the checkpoint is written nevertheless.
        """
        self._collect(wait=True)
        self._report_vanished()
        new = checkpoint_id or new_id()
        content.notes.update(self._notes)
        if metric is not None:
            content.notes["metric"] = {
                "name": self.metric,
                "value": metric,
                "smaller_is_better": self.smaller_is_better,
            }
        if content.resume is not None:
            content.resume.trial = self._notes.get("trial")
        if self.digests is not None or self._unreadable is None:
            self._unreadable = self._unreadable or UnreadableValues()
            self._unreadable.look_for(parts_of(content))
        with signal_deferred(WORKER_DIED):
            if self.in_background and report_written is None:
                copied = self._copy(content, new)
                complete = functools.partial(self._write_copied, copied, new, metric)
            else:
                staging = self.writer.write_files(content, new, report_written)
                complete = functools.partial(self._commit, content, staging, metric)
            if self.in_background:
                with all_signals_deferred():
                    self._under_way = BackgroundTask(complete, name="checkpoint")
            else:
                self._complete.append(complete())
        return new

    def note_metric(self, steps_completed: int, metric: float) -> None:
        """Note the metric of a validation for the checkpoint that was written at the same batch, if there is one."""
        if self._run_retention is not None:
            self._collect(wait=True)
            with signal_deferred(WORKER_DIED):
                self._forget(self._run_retention.note_metric(steps_completed, metric))

    def is_under_way(self) -> bool:
        """Return whether a checkpoint is being written in the background."""
        return self._under_way is not None and not self._under_way.is_done()

    def finish(self) -> None:
        """End the run: wait for the checkpoint that is being written, and make sure that all still exist."""
        self._collect(wait=True)
        self._report_vanished()
        vanished = self._vanished
        self._vanished = []
        self._existing = []
        if vanished:
            raise errors.StorageError(self._describe_vanished(vanished))

    def take_complete(self, wait: bool = False) -> list[str]:
        """Return the ids of the checkpoints that have become complete since the last call, or raise their errors.

        If ``wait``, wait for the one that is being written.
        """
        self._collect(wait)
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

    def _collect(self, wait: bool) -> None:
        under_way = self._under_way
        if under_way is None or not (wait or under_way.is_done()):
            return
        under_way.wait()  # if this is interrupted, it stays under way
        with all_signals_deferred():
            self._under_way = None
            self._complete.append(under_way.result())

    def _copy(self, content: CheckpointContent, checkpoint_id: str) -> CheckpointContent:
        try:
            return self._snapshotter.copy(content, content.copies)
        except (RuntimeError, pickle.PicklingError, AttributeError, TypeError) as e:
            raise errors.CheckpointError(
                f"Checkpoint {checkpoint_id} cannot be written: its state cannot be copied: {e}."
            ) from e

    def _write_copied(self, copied: CheckpointContent, checkpoint_id: str, metric: float | None) -> str:
        self._snapshotter.wait_for_device()
        return self._commit(copied, self.writer.write_files(copied, checkpoint_id), metric)

    def _commit(self, content: CheckpointContent, staging: StagingDirectory, metric: float | None) -> str:
        checkpoint_id = staging.directory.name
        if self.digests is not None and self._unreadable is not None and self._unreadable.are_possible:
            files = [staging.directory / name for name in _FILES_WITH_OBJECTS]
            self.digests[checkpoint_id] = [digest_file(file) for file in files if file.is_file()]
        self.writer.commit(content, staging)
        self._existing.append(checkpoint_id)
        if self._run_retention is not None:
            deleted = self._run_retention.note_written(checkpoint_id, content.trial_state.batches_trained, metric)
            self._forget(deleted)
        return checkpoint_id

    def _forget(self, deleted: list[str]) -> None:
        self._existing = [checkpoint_id for checkpoint_id in self._existing if checkpoint_id not in deleted]

    def _report_vanished(self) -> None:
        """Log an error that names the checkpoints that have vanished since the last call; training goes on."""
        gone = self.storage.find_missing(self._existing)
        if gone:
            self._forget(gone)
            self._vanished += gone
            logger.error("%s", self._describe_vanished(gone))

    def _describe_vanished(self, checkpoint_ids: list[str]) -> str:
        return (
            f"{len(checkpoint_ids)} checkpoints that this run has written to {self.storage} no longer exist: "
            f"{', '.join(checkpoint_ids)}. Was the storage removed or unmounted, or were they deleted by hand? "
            "Retention deletes what need not be kept, and `det-lightning checkpoint prune` deletes what earlier runs "
            "have left over."
        )
