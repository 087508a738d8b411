"""Tests with the real Horovod; where it is missing they are skipped, and the end of the report says so."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.launching import environment
from tests.warm_python import WarmPython

MISSING = importlib.util.find_spec("horovod") is None

Launch = Callable[..., str]


@pytest.fixture(scope="session")
def needs_horovod() -> None:
    """Skip where there is no Horovod."""
    if MISSING:
        pytest.skip("Horovod is not installed; tox -e horovod builds it")


@pytest.fixture(scope="session")
def launch(needs_horovod: None, warm_python: WarmPython) -> Launch:
    """Run a module on two ranks of Horovod, or of torchrun, or in one process; return what was printed."""

    def run(*arguments: str, launcher: str = "horovod", fails: bool = False, **variables: str) -> str:
        launchers = {
            "horovod": ["det_lightning.launch.horovod", "-np", "2", "--", warm_python.executable, "-m"],
            "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"],
            "horovodrun": ["horovod.runner.launch", "-np", "2", warm_python.executable, "-m"],
            "none": [],
        }
        command = [warm_python.executable, "-m", *launchers[launcher], *arguments]
        # What hangs under Horovod hangs forever.
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(**variables))
        assert (done.returncode != 0) == fails, done.stdout[-3000:] + done.stderr[-6000:]
        return done.stdout + done.stderr

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [
        report for report in terminalreporter.stats.get("skipped", []) if "tests/distributed/horovod" in report.nodeid
    ]
    if MISSING and skipped:
        terminalreporter.section("NOT RUN: Horovod", sep="#", red=True)
        terminalreporter.line(f"{len(skipped)} tests need Horovod, which is not installed. Run: tox -e horovod")
