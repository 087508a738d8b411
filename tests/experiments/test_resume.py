"""``experiment resume``: with the options of the run, after a fix, after the runner was killed, and elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from det_lightning.experiments.directory import ExperimentDirectory
from det_lightning.experiments.overview import describe_experiment, summarize_experiment
from tests.experiments.running import events_of, pids_of, run, run_project, run_until, start, wait_for, write_project

pytestmark = pytest.mark.slow

ONE_BY_ONE = {"name": "grid", "metric": "loss", "max_concurrent_trials": 1}


def run_printed(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a shell does that finds the program of this environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(["bash", "-c", command], env={**os.environ, "PATH": path}, capture_output=True, text=True)


def states_of(experiment: Path) -> tuple[str, list[tuple[str, int]]]:
    """Return the state of an experiment, the same in ``ls`` and ``show``, and those of its trials with batches."""
    directory = ExperimentDirectory.existing(experiment)
    shown = describe_experiment(directory)
    assert summarize_experiment(directory)["state"] == shown["state"]
    return shown["state"], [(trial["state"], trial["batches"]) for trial in shown["trials"]]


def test_resume_keeps_options(tmp_path: Path) -> None:
    hparams = {"steps": 4, "waits_at": [2]}
    config = write_project(tmp_path / "project", hyperparameters=hparams, resources={"slots_per_trial": 64})
    folder = tmp_path / "it's  a 'place' & more"
    experiment = folder / "small-1"
    arguments = ("run", config, config.parent, "--experiments", folder, "--cpu", "--slots", 2, "--logger", "csv")
    error = run_until(lambda: len(events_of(experiment, "validation")) >= 2, *arguments)
    (command,) = (line.partition("Resume with: ")[2] for line in error.splitlines() if "Resume with" in line)
    # A runner that cannot write, as on a full disk, says how to go on.
    best = experiment / "trials/best.json"
    best.unlink()
    best.mkdir()
    assert f"resume with: {command}" in run("experiment", "resume", experiment, ends_with=2).stderr
    best.rmdir()
    done = run_printed(command)
    assert done.returncode == 0, done.stderr
    assert "COMPLETED" in done.stderr
    task = json.loads((experiment / "trials/1/task.json").read_text())
    assert (task["slots"], task["loggers"]) == ([0, 1], ["csv"])
    # Options of a resume replace them, also for the next one.
    run("experiment", "resume", experiment, "--slots", 1, "--no-cpu", "--ray", "none")
    options = ExperimentDirectory.existing(experiment).options()
    assert (options.slots, options.cpu, options.ray) == (1, False, None)


def test_failed_trials_go_on_after_a_fix(tmp_path: Path) -> None:
    hparams = {"steps": 5, "checkpoints": True, "fails_at": {"type": "categorical", "vals": [3, 4]}}
    config = write_project(tmp_path / "project", hyperparameters=hparams, searcher=ONE_BY_ONE, max_restarts=1)
    failed = run("run", config, config.parent, "--experiments", tmp_path, ends_with=1)
    experiment = tmp_path / "small-1"
    (command,) = (line for line in failed.stderr.splitlines() if "--retry-failed" in line)
    assert f"After a fix in {experiment / 'code'}, resume with:" in command
    again = run("experiment", "resume", experiment, ends_with=1)  # without a word it stays as it is
    assert "Experiment 1: ERROR" in again.stderr
    script = experiment / "code/trial_script.py"
    script.write_text(script.read_text().replace("return 3", "pass"))
    done = run_printed(command.partition(": ")[2])
    assert done.returncode == 0, done.stderr
    assert states_of(experiment) == ("COMPLETED", [("COMPLETED", 5)] * 2)
    # Each step was trained once: two runs up to the failure, then from the checkpoint on.
    steps = [event["steps_completed"] for event in events_of(experiment, "validation") if event["trial"] == 1]
    assert steps == [1, 2, 3, 4, 5]
    assert [event["run"] for event in events_of(experiment, "run_started") if event["trial"] == 1] == [1, 2, 3]
    # The log with a retry can be read again, and nothing is left to do.
    assert "COMPLETED" in run("experiment", "resume", experiment, "--retry-failed").stderr
    assert len(events_of(experiment, "trial_retried")) == 2


def test_moved_experiment_goes_on(tmp_path: Path) -> None:
    hparams = {"steps": 8, "validates": False, "waits_at": [2], "saves_for_s": 3}
    config = write_project(tmp_path / "project", hyperparameters=hparams)
    experiment = tmp_path / "here/small-1"
    process = start("run", config, config.parent, "--experiments", experiment.parent)
    metrics = experiment / "trials/1/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") == 2)
    assert states_of(experiment) == ("RUNNING", [("RUNNING", 2)])
    process.kill()
    process.wait()
    assert states_of(experiment) == ("PAUSED", [("STOPPING", 2)])
    process.communicate()
    wait_for(lambda: pids_of(experiment) == [])
    wait_for(lambda: states_of(experiment) == ("PAUSED", [("PAUSED", 2)]))
    for place in ("moved/renamed", "copied/small-7"):
        shutil.copytree(experiment, tmp_path / place)
    shutil.rmtree(experiment)
    assert states_of(tmp_path / "moved/renamed") == ("PAUSED", [("PAUSED", 2)])
    copied = tmp_path / "copied/small-7"
    run("experiment", "resume", copied)
    assert states_of(copied) == ("COMPLETED", [("COMPLETED", 8)])
    assert not experiment.exists()


def test_orphan_that_ended_well_is_complete(tmp_path: Path) -> None:
    experiment = run_project(tmp_path, hyperparameters={"steps": 2})
    log = experiment / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    begun = next(index for index, line in enumerate(lines) if '"run_started"' in line)
    log.write_text("".join(lines[: begun + 1]))  # as a runner leaves it that was killed then
    assert states_of(experiment) == ("PAUSED", [("COMPLETED", 2)])
    run("experiment", "resume", experiment)
    assert states_of(experiment) == ("COMPLETED", [("COMPLETED", 2)])
    assert len(events_of(experiment, "run_started")) == 1


# A trial starts again from its newest checkpoint in the storage, whatever the log of the experiment says.

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


def run_until_killed(folder: Path) -> Path:
    """Run the trial until it has reported three checkpoints, all of which stay; return the experiment's directory."""
    config = write_project(
        folder / "project",
        script=write_script(folder / "script"),
        entrypoint="python3 script.py after checkpoint",
        checkpoint_storage={"save_trial_latest": 3},
    )
    run("run", config, config.parent, "--experiments", folder, ends_with=1, is_warm=True)
    return folder / "small-1"


def test_resume_believes_the_storage(tmp_path: Path) -> None:
    experiment = run_until_killed(tmp_path)
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
    experiment = run_until_killed(tmp_path)
    for checkpoint in (experiment / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    run("experiment", "resume", experiment, "--retry-failed", is_warm=True)
    assert begins(experiment) == [0, 0]
    (message,) = events_of(experiment, "message")
    assert "Trial 1 begins again: its 3 reported checkpoints no longer exist, the newest after 3" in message["text"]
