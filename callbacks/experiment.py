"""What an experiment learns of a trial: its metrics, its checkpoints, and that it gave up on its hyperparameters."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import pytorch_lightning as pl

from det_lightning import errors
from det_lightning.adapters.module import TrialModule, require_trial_module
from det_lightning.core._task import TrialTask

logger = logging.getLogger(__name__)


def end_for_invalid_hp(error: errors.InvalidHP, task: TrialTask | None, rank: int) -> NoReturn:
    """End the process well, with one line: a search replaces the trial.

    Raises:
        SystemExit: always, with status 0.
    """
    # On each rank, because a single one may have raised it.
    logger.warning("The trial gave up on its hyperparameters (InvalidHP): %s. The process ends with status 0.", error)
    if rank == 0 and task is not None:
        task.report("early_exit", None, {"reason": "INVALID_HP"})
    raise SystemExit(0) from None


class ExperimentReporter(pl.Callback):
    """Reports metrics and checkpoints to ``det-lightning run``, whose search decides by them.

    Args:
        task: what the runner has passed to this process.
    """

    def __init__(self, task: TrialTask) -> None:
        self._task = task
        self._module: TrialModule | None = None

    def checkpoint_arguments(self) -> dict[str, Any]:
        """Return what a :class:`DeterminedCheckpoint` of this trial needs to know."""
        return {
            "experiment": str(self._task.experiment_id),
            "trial": f"{self._task.experiment_id}.{self._task.trial_id}",
            "best_value": self._task.best_validation,
            "on_complete": self.report_checkpoint,
        }

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Subscribe to the metrics of the module.

        Raises:
            TypeError: the module is not a :class:`TrialModule`.
        """
        self._module = require_trial_module(self, pl_module)
        self._module.reporters.append(self)

    def report_training(
        self, steps_completed: int, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        """Report the averages of a workload."""
        self._task.report("training", steps_completed, avg_metrics)

    def report_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Report the metrics of a validation, with how far training is: a search may compare by it."""
        progress: dict[str, Any] = {"batches": steps_completed}
        if self._module is not None and self._module.context is not None:
            progress["epochs"] = steps_completed // self._module.context.position.epoch_length()
        self._task.report("validation", steps_completed, {**progress, **metrics})

    def report_checkpoint(self, checkpoint_id: str, steps_completed: int) -> None:
        """Report a checkpoint that is complete."""
        self._task.report("checkpoint", steps_completed, {"checkpoint_id": checkpoint_id})
