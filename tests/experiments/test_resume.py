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
    arguments = ("run", config, config.parent, "--experiments", folder, "--cpu", "--slots", 2)
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
    assert json.loads((experiment / "trials/1/task.json").read_text())["slots"] == [0, 1]
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


def test_search_goes_on_after_retries(tmp_path: Path) -> None:
    hparams = {"steps": 3, "fails_at": {"type": "categorical", "vals": [2, 9]}}
    experiment = run_project(tmp_path, hyperparameters=hparams, searcher=ONE_BY_ONE)
    assert sorted(states_of(experiment)[1]) == [("COMPLETED", 3), ("ERROR", 1)]
    script = experiment / "code/trial_script.py"
    script.write_text(script.read_text().replace("return 3", "pass"))
    run("experiment", "resume", experiment, "--retry-failed")
    assert states_of(experiment) == ("COMPLETED", [("COMPLETED", 3)] * 2)
    assert len(events_of(experiment, "trial_created")) == 2


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
