"""Scripts that use the Core API, as trials of an experiment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.experiments.running import events_of, pids_of, run, run_project, run_until, write_project
from tests.launching import TORCHRUN, environment
from tests.warm_python import WarmPython

SCRIPT = Path(__file__).with_name("core_script.py")
BATCH_SCRIPT = Path(__file__).with_name("batch_script.py")
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


def test_several_slots_need_a_distributed_context(tmp_path: Path) -> None:
    script = "import determined as det; det.core.init()"
    config = write_project(tmp_path / "project", entrypoint=["python3", "-c", script], resources={"slots_per_trial": 2})
    run("run", config, tmp_path / "project", "--experiments", tmp_path, "--cpu", ends_with=1, is_warm=True)
    assert "core.init() needs distributed=" in (tmp_path / "small-1" / "trials" / "1" / "log.txt").read_text()


# Batch inference in several processes: alone under torchrun, and as a trial that is interrupted


def output_in(storage: Path) -> list[list[float]]:
    """Return what each of two ranks has written, all of it into one directory."""
    (output,) = {path.parent for path in storage.glob("*/rank_*")}
    files = [sorted((output / f"rank_{rank}").iterdir()) for rank in range(2)]
    return [[square for file in of_rank for square in json.loads(file.read_text())] for of_rank in files]


SQUARES = [[float(number**2) for number in range(rank, 11, 2)] for rank in range(2)]


def test_torchrun_shares_the_batches(warm_python: WarmPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    command = [warm_python.executable, *TORCHRUN, str(BATCH_SCRIPT)]
    subprocess.run(command, check=True, env=environment(CUDA_VISIBLE_DEVICES=""), timeout=200)
    assert output_in(tmp_path / "determined") == SQUARES
    checkpoints = [json.loads(file.read_text()) for file in (tmp_path / "determined").glob("*/metadata.json")]
    assert sorted(one["steps_completed"] for one in checkpoints) == [2, 4, 6]


def test_interrupted_inference_goes_on(tmp_path: Path) -> None:
    config = write_project(
        tmp_path / "project",
        script=BATCH_SCRIPT,
        entrypoint=f"exec python3 -m determined.launch.torch_distributed -- python3 {BATCH_SCRIPT.name} --theirs",
        resources={"slots_per_trial": 2},
    )
    experiment = tmp_path / "small-1"
    arguments = ("run", config, tmp_path / "project", "--experiments", tmp_path, "--cpu")
    run_until(lambda: len(events_of(experiment, "checkpoint")) >= 1, *arguments, is_warm=True)
    assert [one["steps_completed"] for one in events_of(experiment, "checkpoint")] == [2, 4]
    (ended,) = events_of(experiment, "run_ended")
    assert ended["paused"]
    run("experiment", "resume", experiment, "--cpu", is_warm=True)
    assert [one["steps_completed"] for one in events_of(experiment, "checkpoint")] == [2, 4, 6]
    assert events_of(experiment, "run_ended")[-1]["closed"] == "COMPLETED"
    # A run reports the metrics of the batches that it has processed itself.
    totals = [(one["steps_completed"], one["metrics"]["total"]) for one in events_of(experiment, "validation")]
    assert totals == [(4, sum(range(8))), (6, sum(range(8, 11)))]
    # Older checkpoints of the progress are deleted, and the output stays.
    assert output_in(experiment / "checkpoints") == SQUARES
    assert len(list((experiment / "checkpoints").glob("*/metadata.json"))) == 1
