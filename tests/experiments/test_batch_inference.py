"""Batch inference in several processes: alone under torchrun, and as a trial of an experiment that is interrupted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.experiments.running import events_of, run, run_until, write_project
from tests.launching import TORCHRUN, environment
from tests.warm_python import WarmPython

SCRIPT = Path(__file__).with_name("batch_script.py")

pytestmark = pytest.mark.slow


def output_in(storage: Path) -> list[list[float]]:
    """Return what each of two ranks has written, all of it into one directory."""
    (output,) = {path.parent for path in storage.glob("*/rank_*")}
    files = [sorted((output / f"rank_{rank}").iterdir()) for rank in range(2)]
    return [[square for file in of_rank for square in json.loads(file.read_text())] for of_rank in files]


SQUARES = [[float(number**2) for number in range(rank, 11, 2)] for rank in range(2)]


def test_torchrun_shares_the_batches(warm_python: WarmPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    command = [warm_python.executable, *TORCHRUN, str(SCRIPT)]
    subprocess.run(command, check=True, env=environment(CUDA_VISIBLE_DEVICES=""), timeout=200)
    assert output_in(tmp_path / "determined") == SQUARES
    checkpoints = [json.loads(file.read_text()) for file in (tmp_path / "determined").glob("*/metadata.json")]
    assert sorted(one["steps_completed"] for one in checkpoints) == [2, 4, 6]


def test_interrupted_inference_goes_on(tmp_path: Path) -> None:
    config = write_project(
        tmp_path / "project",
        script=SCRIPT,
        entrypoint=f"exec python3 -m determined.launch.torch_distributed -- python3 {SCRIPT.name} --theirs",
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
