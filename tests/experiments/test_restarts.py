"""A trial starts again from its newest checkpoint in the storage, whatever the log of the experiment says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.experiments.running import events_of, run, run_project, write_project

pytestmark = pytest.mark.slow

# A script that saves each step, and is killed once around the report of its third checkpoint.
SCRIPT = """
import json, os, sys
import determined as det
from det_lightning.core._task import TrialTask

moment, group = sys.argv[1:]
info = det.get_cluster_info()
real, seen = TrialTask.report, []

def report(self, kind, steps, metrics):
    seen.append(kind)
    is_last = self.run_id == 1 and kind == group and seen.count(kind) == 3
    if is_last and moment == "before":
        os.kill(os.getpid(), 9)
    real(self, kind, steps, metrics)
    if is_last:
        os.kill(os.getpid(), 9)

TrialTask.report = report
with det.core.init() as context:
    first = 0
    if info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            first = json.loads((path / "step").read_text())
    print("begins at", first, flush=True)
    for step in range(first + 1, 5):
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "step").write_text(json.dumps(step))
"""
KEEPS_LATEST = {"save_experiment_best": 0, "save_trial_best": 0, "save_trial_latest": 1}


def write_script(folder: Path) -> Path:
    folder.mkdir(parents=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return script


def begins(experiment: Path) -> list[int]:
    """Return the steps at which the runs of the trial began."""
    lines = (experiment / "trials/1/log.txt").read_text().splitlines()
    return [int(line.removeprefix("begins at ")) for line in lines if line.startswith("begins at ")]


@pytest.mark.parametrize(
    ("moment", "group", "first"),
    [("before", "checkpoint_begun", 2), ("after", "checkpoint_begun", 2), ("before", "checkpoint", 3)],
)
def test_killed_trial_goes_on_from_its_newest_complete_checkpoint(
    moment: str, group: str, first: int, tmp_path: Path
) -> None:
    experiment = run_project(
        tmp_path,
        is_warm=True,
        script=write_script(tmp_path / "script"),
        entrypoint=f"python3 script.py {moment} {group}",
        max_restarts=1,
        checkpoint_storage={"type": "shared_fs", "host_path": str(tmp_path / "store"), **KEEPS_LATEST},
    )
    assert begins(experiment) == [0, first]
    assert [one["steps_completed"] for one in events_of(experiment, "checkpoint")] == [1, 2, 3, 4]
    complete = [file.parent / "step" for file in (tmp_path / "store").glob("*/metadata.json")]
    assert [json.loads(file.read_text()) for file in complete] == [4]


def test_resume_believes_the_storage(tmp_path: Path) -> None:
    config = write_project(
        tmp_path / "project",
        script=write_script(tmp_path / "script"),
        entrypoint="python3 script.py after checkpoint",
        checkpoint_storage={"save_trial_latest": 3},
    )
    run("run", config, config.parent, "--experiments", tmp_path, ends_with=1, is_warm=True)
    experiment = tmp_path / "small-1"
    checkpoints = experiment / "checkpoints"
    steps = {json.loads(file.read_text()): file.parent for file in checkpoints.glob("*/step")}
    # A checkpoint that was deleted by hand, and one whose removal was interrupted.
    shutil.rmtree(steps[3])
    (steps[2] / "metadata.json").unlink()
    checkpoints.rename(tmp_path / "elsewhere")
    resume = ("experiment", "resume", experiment, "--retry-failed")
    error = run(*resume, ends_with=2, is_warm=True).stderr
    assert f"{checkpoints} does not exist, but trial 1 has written checkpoints there" in error
    assert "Once fixed, resume with: " in error
    (tmp_path / "elsewhere").rename(checkpoints)
    run(*resume, is_warm=True)
    assert begins(experiment) == [0, 1]


def test_trial_without_any_checkpoint_says_that_it_begins_again(tmp_path: Path) -> None:
    config = write_project(
        tmp_path / "project",
        script=write_script(tmp_path / "script"),
        entrypoint="python3 script.py after checkpoint",
        checkpoint_storage={"save_trial_latest": 3},
    )
    run("run", config, config.parent, "--experiments", tmp_path, ends_with=1, is_warm=True)
    experiment = tmp_path / "small-1"
    for checkpoint in (experiment / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    run("experiment", "resume", experiment, "--retry-failed", is_warm=True)
    assert begins(experiment) == [0, 0]
    (message,) = events_of(experiment, "message")
    assert "Trial 1 begins again: its 3 reported checkpoints no longer exist, the newest after 3" in message["text"]
