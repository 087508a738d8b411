"""``det-lightning run`` serves trials of Estimators as it serves others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed; run tox -e estimator")

from tests.experiments.running import events_of, run

pytestmark = pytest.mark.slow

CONFIG: dict[str, Any] = {
    "name": "numbers",
    "entrypoint": "experiment_trial:NumbersTrial",
    "hyperparameters": {"lr": {"type": "categorical", "vals": [0.0001, 0.001]}, "global_batch_size": 8},
    "records_per_epoch": 64,
    "searcher": {"name": "grid", "metric": "average_loss", "max_length": {"epochs": 2}},
    "reproducibility": {"experiment_seed": 7},
    "max_restarts": 0,
}


def write_project(folder: Path, **sections: Any) -> Path:
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("experiment_trial.py"), folder)
    (folder / "config.yaml").write_text(json.dumps({**CONFIG, **sections}))
    return folder / "config.yaml"


def test_a_search_compares_trials(tmp_path: Path) -> None:
    config = write_project(tmp_path / "project")
    run("run", config, config.parent, "--experiments", tmp_path, timeout_s=300)
    validations = events_of(tmp_path / "numbers-1", "validation")
    assert len(validations) == 2
    assert {event["steps_completed"] for event in validations} == {16}
    assert all("average_loss" in event["metrics"] for event in validations)
