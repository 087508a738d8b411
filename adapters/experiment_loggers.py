"""Lightning loggers for the trial of an experiment, as ``det-lightning run --logger`` names them."""

from __future__ import annotations

import os
from pathlib import Path

from pytorch_lightning.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from det_lightning.core._task import TrialTask


def experiment_loggers(task: TrialTask) -> list[Logger]:
    """Return new loggers for a task; a package that is missing raises a ModuleNotFoundError.

    Files go to the trial's directory; those of MLflow to the experiment's, unless ``MLFLOW_TRACKING_URI`` is set.
    """
    builders = {"csv": _csv, "tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}
    return [builders[name](task) for name in task.loggers]


def _csv(task: TrialTask) -> Logger:
    return CSVLogger(task.directory, name="csv", version=_run(task))


def _tensorboard(task: TrialTask) -> Logger:
    return TensorBoardLogger(task.directory, name="lightning", version=_run(task), default_hp_metric=False)


def _mlflow(task: TrialTask) -> Logger:
    tags = {"experiment": str(task.experiment_id), "trial": str(task.trial_id), "run": str(task.run_id)}
    experiment = task.config["name"]
    directory = task.directory.parent.parent
    server = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory / 'mlflow.db'}"
    _create_mlflow_experiment(experiment, server, directory / "mlruns")
    name = f"trial-{task.trial_id}-{_run(task)}"
    return MLFlowLogger(experiment, run_name=name, tracking_uri=server, tags=tags)


def _create_mlflow_experiment(name: str, server: str, artifacts: Path) -> None:
    """Create the experiment unless it exists. The logger itself would fail if another trial did so at the same time."""
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


def _wandb(task: TrialTask) -> Logger:
    name = task.config["name"]
    return WandbLogger(
        name=f"trial-{task.trial_id}-{_run(task)}",
        save_dir=task.directory,
        project=name,
        group=f"{name}-{task.experiment_id}",
    )


def _run(task: TrialTask) -> str:
    return f"run-{task.run_id}"
