"""A run in its storage: the name of its trial, its checkpoints, and what keeps other runs from deleting them."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any

from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.retention.pruning import RunRetention
from det_lightning.checkpoint.retention.rule import Retention
from det_lightning.checkpoint.retention.run_claims import RunClaims, remove_dead_claims
from det_lightning.checkpoint.retention.trial_index import TrialIndex
from det_lightning.checkpoint.saving import CheckpointSaver
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage

logger = logging.getLogger(__name__)


class RunStorage:
    """The storage of a trial's runs: claims the trial's name, and writes checkpoints that record where they belong.

    For the arguments see ``DeterminedCheckpoint``.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        saver: CheckpointSaver,
        *,
        metric: str | None,
        smaller_is_better: bool,
        retention: Retention | None,
        experiment: str | None,
        trial: str | None,
        job: str | None,
    ) -> None:
        self.storage = storage
        self.saver = saver
        self.metric = metric
        self.smaller_is_better = smaller_is_better
        self.claims = RunClaims(storage)
        self._retention = retention
        self._experiment = experiment
        self._given_trial = trial
        self._job = job
        self._trial = ""
        self._notes: dict[str, Any] = {}
        self._hurries = False

    def begin(self, path: str | os.PathLike[str] | None, resumed: CheckpointContent | None) -> None:
        """Claim the name of the trial, and remove what killed runs have left behind.

        ``path`` is the path or URL of the checkpoint that the run resumes from, and ``resumed`` its content.
        """
        self.storage.require_writable()
        self.storage.remove_abandoned()
        remove_dead_claims(self.storage.root)
        inherited = None if resumed is None or resumed.resume is None else resumed.resume.trial
        self._trial = self.claims.claim_trial(self._experiment, self._given_trial, inherited)
        parent = (resumed.name or None) if resumed is not None else None
        experiment = self._experiment or self._trial
        self._notes = {"trial": self._trial, "experiment": experiment, **self.claims.trace_back(path, parent)}
        if self._job is not None:
            self._notes["job"] = self._job
        if self._retention is not None:
            index = TrialIndex(self.storage.root, experiment, self._trial, self.metric, self.smaller_is_better)
            self.saver.retention = RunRetention(self.storage, index, self._retention, self.claims.run_id)
            self.saver.retention.catch_up(parent)

    def hurry_when(self, is_ending: Callable[[], bool]) -> None:
        """Retry without pauses, at a storage that fails, once ``is_ending()`` is true."""
        self.storage.hurry_when(lambda: self._hurries or is_ending())

    def save(
        self,
        content: CheckpointContent,
        checkpoint_id: str,
        metric: float | None,
        report_written: Callable[[pathlib.Path], None] | None,
    ) -> None:
        """Write a checkpoint of the trial, or begin to; see :meth:`CheckpointSaver.save`."""
        content.notes.update(self._notes)
        if metric is not None:
            content.notes["metric"] = {
                "name": self.metric,
                "value": metric,
                "smaller_is_better": self.smaller_is_better,
            }
        if content.resume is not None:
            content.resume.trial = self._trial
        self.saver.save(content, metric, report_written, checkpoint_id)

    def finish_in_a_hurry(self) -> list[str]:
        """Wait for the checkpoint that is under way; return the ids of those that have become complete."""
        self._hurries = True
        if self.saver.is_under_way():
            logger.warning("A checkpoint is being written; the process waits for it. Ctrl-C would give it up.")
        try:
            return self.saver.take_complete(wait=True)
        finally:
            self._hurries = False  # the storage may be used by another run
