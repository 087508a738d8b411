"""Loggers of Lightning for the trial of an experiment, as ``det-lightning run --logger`` names them."""

from __future__ import annotations

from pytorch_lightning.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from det_lightning.core._task import TrialTask


def experiment_loggers(task: TrialTask) -> list[Logger]:
    """Return the loggers that a task names. A trial that is started again logs to new ones.

    Files go to the directory of the trial; where MLflow and Weights & Biases keep theirs is up to their variables of
    the environment.

    Raises:
        ModuleNotFoundError: a package is not installed.
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
    directory = task.directory.parent.parent / "mlruns"
    return MLFlowLogger(experiment, run_name=f"trial-{task.trial_id}-{_run(task)}", tags=tags, save_dir=str(directory))


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
