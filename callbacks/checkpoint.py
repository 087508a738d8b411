"""Checkpoints in Determined's format."""

from __future__ import annotations

import logging
import math
import os
import pathlib
from typing import Any

import pytorch_lightning as pl

from det_lightning.adapters.metrics import is_numerical_scalar
from det_lightning.adapters.run import TrialRun
from det_lightning.callbacks.attaching import require_trial_module
from det_lightning.checkpoint.storage import CheckpointStorage
from det_lightning.checkpoint.writer import CheckpointWriter
from det_lightning.units import TrainUnit

__all__ = ["POLICIES", "DeterminedCheckpoint"]

logger = logging.getLogger("det_lightning.checkpoint")

POLICIES = ("best", "all", "none")


class DeterminedCheckpoint(pl.Callback):
    """Writes checkpoints that Determined 0.38 and det_lightning load.

    Besides those by ``period`` and by ``policy`` there is always one at the end of the training.

    Args:
        storage: the directory that gets one directory for each checkpoint; by default Determined's own for local
            runs.
        policy: which validations are followed by a checkpoint: ``"all"``, ``"best"`` (those that improve ``metric``)
            or ``"none"``.
        period: when else checkpoints are due, such as ``Batch(1000)`` or ``Epoch(1)``.
        metric: name of the validation metric that ``"best"`` compares.
        smaller_is_better: whether a smaller value of ``metric`` is an improvement.
        code_dir: the directory that is copied into each checkpoint; by default the working directory.

    Attributes:
        last_checkpoint_id: id of the checkpoint written last, None before the first.
        last_checkpoint_path: its directory.
        best_checkpoint_path: directory of the checkpoint that followed the best validation; None before the first,
            or with another policy than ``"best"``.
        best_value: the best value of ``metric`` up to now.

    Raises:
        ValueError: the policy is unknown, or ``"best"`` has no metric.
    """

    def __init__(
        self,
        storage: str | os.PathLike[str] | None = None,
        *,
        policy: str = "best",
        period: TrainUnit | None = None,
        metric: str | None = None,
        smaller_is_better: bool = True,
        code_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"checkpoint_policy must be one of {', '.join(POLICIES)}; got {policy!r}.")
        if policy == "best" and metric is None:
            raise ValueError(
                "checkpoint policy 'best' needs to know the metric to compare: give metric='validation_loss', or use "
                "policy='all'."
            )
        self.period = period
        self.last_checkpoint_id: str | None = None
        self.last_checkpoint_path: pathlib.Path | None = None
        self.best_checkpoint_path: pathlib.Path | None = None
        self.best_value: float | None = None
        self._policy = policy
        self._metric = metric
        self._smaller_is_better = smaller_is_better
        self._writer = CheckpointWriter(
            CheckpointStorage(storage), pathlib.Path(code_dir) if code_dir is not None else None
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Offer to write the checkpoints of the module.

        Raises:
            TypeError: the module is no :class:`TrialModule`.
        """
        require_trial_module(self, pl_module).attach(checkpointer=self)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare with the best value of the run that this one goes on from."""
        resume = require_trial_module(self, pl_module).resume_point
        self.best_value = resume.extra.get("best_value") if resume is not None and resume.extra is not None else None

    def save(self, run: TrialRun) -> None:
        """Write a checkpoint of ``run``.

        Raises:
            CheckpointError: it can not be written; earlier checkpoints are as they were.
        """
        run.state.last_ckpt = run.state.batches_trained
        state = run.collect_checkpoint()
        resume = {**run.collect_resume(), "best_value": self.best_value}
        with self._writer.write(state, run.state, run.load_data(), resume) as (checkpoint_id, directory):
            run.events.tell_written(str(directory))
        self.last_checkpoint_id, self.last_checkpoint_path = checkpoint_id, directory
        logger.info("Checkpoint %s after %d batches.", checkpoint_id, run.state.batches_trained)
        run.events.emit("on_checkpoint_upload_end", uuid=checkpoint_id)

    def save_after_validation(self, run: TrialRun, metrics: dict[str, Any]) -> None:
        """Write a checkpoint if the policy wants one after a validation with these metrics.

        Raises:
            ValueError: the metric to compare is not among them, or is no number.
        """
        improved = self._policy == "best" and self._note_improvement(metrics)
        if (improved or self._policy == "all") and not run.checkpoint_is_current():
            self.save(run)
        if improved:
            self.best_checkpoint_path = self.last_checkpoint_path

    def _note_improvement(self, metrics: dict[str, Any]) -> bool:
        value = metrics.get(self._metric or "")
        if value is None or not is_numerical_scalar(value):
            raise ValueError(
                f"checkpoint policy 'best' compares the validation metric {self._metric!r}, which must be a number; "
                f"the validation returned {sorted(metrics)}"
                + (f", and {self._metric!r} is {value!r}." if value is not None else ".")
            )
        now, before = float(value), self.best_value
        better = before is None or math.isnan(before) or (now < before if self._smaller_is_better else now > before)
        if better:
            self.best_value = now
        return better
