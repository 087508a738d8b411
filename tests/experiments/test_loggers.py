"""``det-lightning run --logger``: loggers of Lightning for all trials of an experiment."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path

import pytest

from tests.experiments.running import events_of, run, run_until, write_project
from tests.experiments.test_trial_classes import run_experiment

pytestmark = pytest.mark.slow


def test_csv_logger_has_metrics_and_hparams(tmp_path: Path) -> None:
    experiment = run_experiment(tmp_path, "--logger", "csv", hyperparameters={"lr": 0.1, "global_batch_size": 8})
    logged = experiment / "trials" / "1" / "csv" / "run-1"
    with (logged / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    validations = {int(row["step"]): float(row["validation_loss"]) for row in rows if row["validation_loss"]}
    events = events_of(experiment, "validation")
    reported = {event["steps_completed"]: event["metrics"]["validation_loss"] for event in events}
    assert validations == pytest.approx(reported)
    assert any(row["loss"] for row in rows)
    assert "lr: 0.1" in (logged / "hparams.yaml").read_text()


def test_resume_keeps_loggers(tmp_path: Path) -> None:
    config = write_project(tmp_path / "project", hyperparameters={"steps": 4, "waits_at": [2]})
    experiment = tmp_path / "small-1"
    arguments = ("run", config, tmp_path / "project", "--experiments", tmp_path)
    loggers = ("--logger", "csv", "--logger", "tensorboard")
    run_until(lambda: len(events_of(experiment, "validation")) >= 2, *arguments, *loggers)
    run("experiment", "resume", experiment)
    task = json.loads((experiment / "trials" / "1" / "task.json").read_text())
    assert (task["run_id"], task["loggers"]) == (2, ["csv", "tensorboard"])


def test_unusable_loggers_are_named_first(tmp_path: Path) -> None:
    missing = [package for package in ("mlflow", "wandb") if importlib.util.find_spec(package) is None]
    config = write_project(tmp_path / "project")
    options = [part for name in ("csv", "excel", *missing) for part in ("--logger", name)]
    error = run("run", config, tmp_path / "project", "--experiments", tmp_path / "out", *options, ends_with=2).stderr
    assert "--logger excel: must be one of csv, tensorboard, mlflow, wandb" in error
    for package in missing:
        assert f"--logger {package}: needs a package; pip install {package}" in error
    assert not (tmp_path / "out").exists()
