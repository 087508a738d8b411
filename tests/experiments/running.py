"""Experiments in small: a configuration, its directory, and the command that runs it as a process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from det_lightning.cli.app import app
from det_lightning.experiments.event_log import read_events
from tests.warm_python import start_warm_python

SCRIPT = Path(__file__).with_name("trial_script.py")


def write_project(folder: Path, script: Path = SCRIPT, **sections: Any) -> Path:
    """Write a directory with a script and a configuration, and return the file of the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(script, folder)
    config = {
        "name": "small",
        "entrypoint": f"python3 {script.name}",
        "searcher": {"name": "single", "metric": "loss"},
        "max_restarts": 0,
        "reproducibility": {"experiment_seed": 7},
        **sections,
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    return folder / "config.yaml"


def start(*arguments: object, cwd: Path | None = None, is_warm: bool = False) -> subprocess.Popen[str]:
    """Start ``det-lightning`` with arguments, in this process's directory or another one.

    Where it is warm, its trials are, too; ``pids_of`` does not find such trials.
    """
    command = [sys.executable, "-c", "from det_lightning.cli import main; main()", *map(str, arguments)]
    environment = dict(os.environ)
    if is_warm:
        warm = start_warm_python()
        command[0] = warm.executable
        environment["PATH"] = os.pathsep.join([str(warm.programs), environment["PATH"]])
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=environment)


def run(
    *arguments: object, ends_with: int = 0, cwd: Path | None = None, timeout_s: float = 120, is_warm: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``det-lightning`` with arguments to its end; its own process is this one, unless that makes a difference."""
    if not is_warm and cwd is None and "--ray" not in arguments:
        result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == ends_with, result.stderr
        return subprocess.CompletedProcess([], result.exit_code, result.stdout, result.stderr)
    process = start(*arguments, cwd=cwd, is_warm=is_warm)
    output, error = process.communicate(timeout=timeout_s)
    assert process.returncode == ends_with, error
    return subprocess.CompletedProcess(process.args, process.returncode, output, error)


def run_project(folder: Path, *options: object, is_warm: bool = False, **sections: Any) -> Path:
    """Write a project with these sections and run it as an experiment; return the experiment's directory."""
    config = write_project(folder / "project", **sections)
    run("run", config, config.parent, "--experiments", folder, *options, is_warm=is_warm)
    return folder / "small-1"


def run_until(condition: Callable[[], bool], *arguments: object, is_warm: bool = False) -> str:
    """Run ``det-lightning`` with arguments, interrupt it once a condition holds, and return what it says then."""
    process = start(*arguments, is_warm=is_warm)
    wait_for(condition, timeout_s=200)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=100)[1]
    assert process.returncode == 130, error
    return error


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def events_of(experiment: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a type in the log of an experiment; none where there is no log yet."""
    log = experiment / "events.jsonl"
    return [event for event in read_events(log) if event["type"] == kind] if log.exists() else []


def pids_of(experiment: Path) -> list[int]:
    """Return the living processes that belong to trials of an experiment, by their environment."""
    return processes_with(f"DET_LIGHTNING_TASK={experiment}")


def processes_with(variable: str) -> list[int]:
    """Return the living processes whose environment has a variable that begins so."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
            is_dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if not is_dead and variable.encode() in environment:
            found.append(int(entry.name))
    return found


def kill(process: subprocess.Popen[str]) -> None:
    """End a process with ``SIGKILL``."""
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
