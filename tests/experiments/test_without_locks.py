"""Experiments and storages on a file system without ``flock``, such as Lustre mounted without it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.experiments.running import events_of, pids_of, run, start, wait_for, write_project

WITHOUT = "#include <errno.h>\nint flock(int file, int operation) { errno = %s; return -1; }\n"


@pytest.fixture(params=["ENOSYS", "EOPNOTSUPP", "ENOLCK"])
def without_locks(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``flock`` fail in all processes that the test starts."""
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    (tmp_path / "flock.c").write_text(WITHOUT % request.param)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "flock.so", tmp_path / "flock.c"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "flock.so"))


def show(experiment: Path) -> tuple[str, str]:
    """Return the states of the experiment and of its trial, as another process shows them."""
    shown = json.loads(run("experiment", "show", experiment, "--json", cwd=experiment.parent).stdout)
    return shown["state"], shown["trials"][0]["state"]


@pytest.mark.slow
@pytest.mark.usefixtures("without_locks")
def test_experiment_runs_and_resumes(tmp_path: Path) -> None:
    config = write_project(tmp_path / "project", hyperparameters={"steps": 4, "waits_at": [2]})
    experiment = tmp_path / "small-1"
    process = start("run", config, config.parent, "--experiments", tmp_path)
    wait_for(lambda: len(events_of(experiment, "validation")) == 2)
    assert show(experiment) == ("RUNNING", "RUNNING")
    stop = run("experiment", "stop", experiment, cwd=tmp_path, ends_with=2)
    assert f"small-1 has no file locks, so process {process.pid} may be another program by now" in stop.stderr
    process.kill()
    error = process.communicate(timeout=60)[1]
    assert error.count(f"{experiment} has no file locks: nothing keeps another process from running") == 1
    wait_for(lambda: not pids_of(experiment))
    assert show(experiment) == ("PAUSED", "PAUSED")
    run("experiment", "resume", experiment, cwd=tmp_path)
    assert show(experiment) == ("COMPLETED", "COMPLETED")
