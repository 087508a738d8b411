"""Scripts that use the Core API, as trials of an experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.experiments.running import events_of, pids_of, run, run_project, run_until, write_project

SCRIPT = Path(__file__).with_name("core_script.py")
PROJECT: dict[str, Any] = {
    "script": SCRIPT,
    "entrypoint": f"exec python3 {SCRIPT.name}",
    "hyperparameters": {"lr": 1.0},
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 4}},
}

pytestmark = pytest.mark.slow


def test_script_reports_metrics_and_checkpoints(tmp_path: Path) -> None:
    experiment = run_project(tmp_path, is_warm=True, **PROJECT)
    losses = [(one["steps_completed"], one["metrics"]["loss"]) for one in events_of(experiment, "validation")]
    assert losses == [(step, 1.0 / step) for step in range(1, 5)]
    assert [one["steps_completed"] for one in events_of(experiment, "checkpoint")] == [1, 2, 3, 4]
    trial = experiment / "trials" / "1"
    assert json.loads((trial / "status.json").read_text()) == {"status": "step 4"}
    assert json.loads((trial / "metadata.json").read_text()) == {"begins_at": 0}
    events = EventAccumulator(str(trial / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["Determined/loss", "Determined/val_loss"]
    # By the defaults of a configuration the best checkpoint of the experiment and the latest of each trial stay.
    assert len({path.parent.name for path in (experiment / "checkpoints").glob("*/metadata.json")}) == 1


def test_preempted_script_goes_on(tmp_path: Path) -> None:
    config = write_project(tmp_path / "project", **{**PROJECT, "hyperparameters": {"lr": 1.0, "waits_at": 2}})
    experiment = tmp_path / "small-1"
    arguments = ("run", config, tmp_path / "project", "--experiments", tmp_path)
    run_until(lambda: len(events_of(experiment, "validation")) >= 2, *arguments)
    (ended,) = events_of(experiment, "run_ended")
    assert (ended["status"], ended["paused"], ended["closed"]) == (0, True, None)
    run("experiment", "resume", experiment)
    assert json.loads((experiment / "trials" / "1" / "metadata.json").read_text()) == {"begins_at": 2}
    assert [one["steps_completed"] for one in events_of(experiment, "validation")] == [1, 2, 3, 4]
    assert [one["closed"] for one in events_of(experiment, "run_ended")] == [None, "COMPLETED"]
    assert pids_of(experiment) == []


def test_asha_stops_scripts_by_their_validations(tmp_path: Path) -> None:
    searcher = {
        "name": "adaptive_asha", "metric": "loss", "max_length": {"batches": 16}, "max_trials": 4,
        "max_concurrent_trials": 1, "mode": "aggressive",
    }  # fmt: skip
    hparams = {"lr": {"type": "double", "minval": 0.1, "maxval": 1.0}}
    sections = {**PROJECT, "hyperparameters": hparams, "searcher": searcher}
    experiment = run_project(tmp_path, is_warm=True, **sections)
    assert len(events_of(experiment, "trial_created")) == 4
    assert {one["closed"] for one in events_of(experiment, "run_ended")} == {"COMPLETED"}
    lengths = [sum(one["trial"] == trial for one in events_of(experiment, "validation")) for trial in range(1, 5)]
    assert max(lengths) == 16


def test_several_slots_need_a_distributed_context(tmp_path: Path) -> None:
    script = "import determined as det; det.core.init()"
    config = write_project(tmp_path / "project", entrypoint=["python3", "-c", script], resources={"slots_per_trial": 2})
    run("run", config, tmp_path / "project", "--experiments", tmp_path, "--cpu", ends_with=1, is_warm=True)
    assert "core.init() needs distributed=" in (tmp_path / "small-1" / "trials" / "1" / "log.txt").read_text()


def test_launcher_starts_a_process_per_slot(tmp_path: Path) -> None:
    entrypoint = f"python3 -m determined.launch.torch_distributed -- python3 {SCRIPT.name}"
    options = ["--cpu", "--config", f"entrypoint={entrypoint}"]
    experiment = run_project(tmp_path, *options, is_warm=True, resources={"slots_per_trial": 2}, **PROJECT)
    assert [one["steps_completed"] for one in events_of(experiment, "validation")] == [1, 2, 3, 4]
    (kept,) = (experiment / "checkpoints").glob("*/metadata.json")
    assert {path.name for path in kept.parent.iterdir()} == {"metadata.json", "rank0", "rank1", "state.json"}
