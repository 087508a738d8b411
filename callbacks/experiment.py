"""``ExperimentReporter``: reports a trial to ``det-lightning run``, and makes the loggers that it was asked for.

Change here: a logger of ``det-lightning run --logger`` is an entry of ``_LOGGERS``, and of ``PACKAGES`` in
``det_lightning/experiments/lifecycle.py``.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from det_lightning import errors
from det_lightning.adapters.lightning_package import pl
from det_lightning.adapters.module import TrialModule, require_trial_module
from det_lightning.checkpoint.format.content import CheckpointReading
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.core._task import TrialTask
from det_lightning.core._tensorboard import TensorBoardOutput
from det_lightning.escaping import get_logger

# Progress is only for display, which needs no more.
_PROGRESS_INTERVAL_S = 1.0

logger = get_logger(__name__)


def report_invalid_hp(task: TrialTask | None) -> None:
    """Report to the experiment, if any, that a rank gave up on the hyperparameters; the search replaces the trial."""
    if task is not None:
        task.report("early_exit", None, {"reason": "INVALID_HP"})


def end_for_invalid_hp(error: BaseException, given_up: str) -> None:
    """End the process with one line and status 0 if the trial gave up, here or, as ``given_up`` says, on another rank.

    When another rank gives up, this rank may end with any error, such as a lost connection.

    Raises:
        SystemExit: the trial gave up.
    """
    if isinstance(error, errors.InvalidHP):
        why = f"The trial gave up on its hyperparameters (InvalidHP): {error}"
    elif given_up and isinstance(error, Exception):
        why = f"{given_up[0].upper()}{given_up[1:]}. This rank ended with {type(error).__name__}: {error!s:.300}"
    else:
        return
    logger.warning("%s. The process ends with status 0.", why.rstrip("."))
    raise SystemExit(0) from None


class ExperimentReporter(pl.Callback):
    """Reports metrics, progress and checkpoints to ``det-lightning run``, whose search decides by them."""

    def __init__(self, task: TrialTask) -> None:
        self._task = task
        self._module: TrialModule | None = None
        self._loggers: list[pl.loggers.Logger] = []
        self._progress_at = 0.0
        self._digests: dict[str, list[str]] = {}  # of checkpoints that are not complete yet

    def complete(self, reading: CheckpointReading) -> CheckpointReading:
        """Return ``reading`` with the trust of the experiment: in everything, or in files that its trials wrote."""
        trusted = reading.trusted or self._task.trusted
        return dataclasses.replace(reading, trusted=trusted, recorded=self._task.recorded)

    def callbacks(self, output: TensorBoardOutput) -> list[pl.Callback]:
        """Return this callback and the one for TensorBoard's HParams; both must precede the writer of checkpoints."""
        from det_lightning.callbacks.hparams import HParamsSummary  # imports tensorboard

        return [self, HParamsSummary(output, self._task)]

    def make_loggers(self) -> list[pl.loggers.Logger]:
        """Return new Lightning loggers, as the experiment configures.

        Files go to the trial's directory. MLflow's files go to the experiment's directory, unless
        ``MLFLOW_TRACKING_URI`` is set.

        Raises:
            ModuleNotFoundError: a logger's package is missing.
        """
        self._loggers = [_LOGGERS[name](self._task) for name in self._task.loggers]
        return self._loggers

    def checkpoint_arguments(self) -> dict[str, Any]:
        """Return what the experiment knows for ``Saving``: names, the other trials' best value, and where to report."""
        return {
            "experiment": str(self._task.experiment_id),
            "trial": f"{self._task.experiment_id}.{self._task.trial_id}",
            "best_elsewhere": self._task.best_of_others,
            "on_begin": self.report_begun,
            "on_written": self.report_checkpoint,
            "on_delete": self.report_deleted,
        }

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Subscribe, on the chief, to the reports of the module, and log the hyperparameters.

        Raises:
            TypeError: the module is not a ``TrialModule``.
        """
        self._module = require_trial_module(self, pl_module)
        if trainer.is_global_zero:
            self._module.reporters.append(self)
        for logger in self._loggers:
            logger.log_hyperparams(self._task.hparams)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Count from zero after a warm start, as Determined does if the checkpoint is from another trial."""
        source = self._task.config["searcher"].get("source_checkpoint_uuid")
        content = pl_module.resume_content
        if source is not None and content is not None and content.name == PurePosixPath(source).name:
            pl_module.resume_content = content.for_new_trial()

    def report_training(
        self, steps_completed: int, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        """Report the average metrics of a workload after ``steps_completed`` batches, and the progress."""
        self._task.report("training", steps_completed, avg_metrics)
        self._report_progress(steps_completed)

    def _report_progress(self, steps_completed: int) -> None:
        now = time.monotonic()
        if self._module is None or now - self._progress_at < _PROGRESS_INTERVAL_S:
            return
        progress = self._module.trial_run.progress()
        if progress is not None:
            self._progress_at = now
            self._task.report("progress", steps_completed, {"progress": progress})

    def report_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Report the metrics of a validation, with the batches and epochs trained, for searches to compare trials."""
        progress: dict[str, Any] = {"batches": steps_completed}
        if self._module is not None and self._module.context is not None:
            progress["epochs"] = steps_completed // self._module.context.position.epoch_length()
        self._task.report("validation", steps_completed, {**progress, **metrics})

    def report_begun(
        self, checkpoint_id: str, steps_completed: int, storage: CheckpointStorage, sha256: list[str]
    ) -> None:
        """Announce a checkpoint before it is complete, with the SHA-256 of files to trust later."""
        self._digests[checkpoint_id] = sha256
        self._task.report_begun(checkpoint_id, steps_completed, storage, sha256)

    def report_deleted(self, checkpoint_id: str) -> None:
        """Report a checkpoint that the retention of this run has deleted."""
        self._task.report("checkpoint_deleted", None, {"checkpoint_id": checkpoint_id})

    def report_checkpoint(self, checkpoint_id: str, steps_completed: int) -> None:
        """Report a complete checkpoint after ``steps_completed`` batches, with the SHA-256 of files to trust later."""
        values: dict[str, Any] = {"checkpoint_id": checkpoint_id}
        if self._digests.get(checkpoint_id):
            values["sha256"] = self._digests.pop(checkpoint_id)
        self._task.report("checkpoint", steps_completed, values)


def _mlflow(task: TrialTask) -> pl.loggers.Logger:
    tags = {"experiment": str(task.experiment_id), "trial": str(task.trial_id), "run": str(task.run_id)}
    experiment = task.config["name"]
    directory = task.directory.parent.parent
    server = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory / 'mlflow.db'}"
    _create_mlflow_experiment(experiment, server, directory / "mlruns")
    name = f"trial-{task.trial_id}-{_run(task)}"
    return pl.loggers.MLFlowLogger(experiment, run_name=name, tracking_uri=server, tags=tags)


def _create_mlflow_experiment(name: str, server: str, artifacts: Path) -> None:
    """Create the experiment unless it exists; the logger would fail if another trial did so at the same time."""
    import mlflow

    client = mlflow.MlflowClient(server)
    if client.get_experiment_by_name(name) is not None:
        return
    location = artifacts.as_uri() if server.startswith("sqlite:") else None
    try:
        client.create_experiment(name, artifact_location=location)
    except mlflow.MlflowException:
        if client.get_experiment_by_name(name) is None:
            raise


def _wandb(task: TrialTask) -> pl.loggers.Logger:
    name = task.config["name"]
    return pl.loggers.WandbLogger(
        name=f"trial-{task.trial_id}-{_run(task)}",
        save_dir=task.directory,
        project=name,
        group=f"{name}-{task.experiment_id}",
    )


def _run(task: TrialTask) -> str:
    return f"run-{task.run_id}"


_LOGGERS: dict[str, Callable[[TrialTask], pl.loggers.Logger]] = {
    "csv": lambda task: pl.loggers.CSVLogger(task.directory, "csv", _run(task)),
    "tensorboard": lambda task: pl.loggers.TensorBoardLogger(
        task.directory, "lightning", _run(task), default_hp_metric=False
    ),
    "mlflow": _mlflow,
    "wandb": _wandb,
}
