"""Runs of trials as processes below a supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from det_lightning.core._task import TrialTask
from det_lightning.experiments.supervisor import identify_machine
from det_lightning.experiments.trial_process import OrphanedRun, TrialProcess, read_status
from tests.experiments.running import processes_with, wait_for


def task_of(directory: Path, run: int) -> TrialTask:
    return TrialTask(directory, 1, 1, run, 0, hparams={}, config={}, slots=[0], checkpoint_storage=str(directory))


def start_run(
    directory: Path, command: str, run: int = 1, newest_run: int = 1, detached: bool = False, grace_s: float = 60
) -> TrialProcess:
    """Start a shell command as a run of a trial, of which ``newest_run`` was the last to be prepared."""
    (directory / "task.json").write_text(json.dumps({"run_id": newest_run}))
    return TrialProcess(task_of(directory, run), ["sh", "-c", command], directory, dict(os.environ), grace_s, detached)


@pytest.mark.parametrize("detached", [False, True])
def test_status_of_a_run_that_has_ended_is_known(detached: bool, tmp_path: Path) -> None:
    process = start_run(tmp_path, "exit 5", detached=detached)
    wait_for(process.has_ended)
    assert process.exit_status() == 5


@pytest.mark.parametrize(("ask", "status"), [("stop", 75), ("kill", 137)])
@pytest.mark.parametrize("detached", [False, True])
def test_run_ends_when_it_is_asked_to(ask: str, status: int, detached: bool, tmp_path: Path) -> None:
    process = start_run(tmp_path, "touch begun; exec sleep 600", detached=detached)
    wait_for((tmp_path / "begun").exists)
    assert not process.has_ended()
    getattr(process, ask)()
    wait_for(process.has_ended)
    assert process.exit_status() == status


def test_detached_run_is_no_child(tmp_path: Path) -> None:
    process = start_run(tmp_path, "echo $PPID > supervisor; exec sleep 600", detached=True)
    wait_for(lambda: (tmp_path / "supervisor").exists() and bool((tmp_path / "supervisor").read_text()))
    supervisor = int((tmp_path / "supervisor").read_text())
    assert int(Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1]) != os.getpid()
    process.kill()
    wait_for(process.has_ended)


def test_outdated_run_does_nothing(tmp_path: Path) -> None:
    wait_for(start_run(tmp_path, "touch begun", run=1, newest_run=2).has_ended)
    assert not (tmp_path / "begun").exists()
    assert read_status(tmp_path, 1) is None


@pytest.mark.parametrize("detached", [False, True])
def test_failing_supervisor_is_named(detached: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process = start_run(tmp_path, "true", newest_run=1, detached=detached)
    wait_for(process.has_ended)
    assert process.problem() is None
    (tmp_path / "exit.json.tmp").mkdir()
    process = start_run(tmp_path, "true", run=2, newest_run=2, detached=detached)
    wait_for(process.has_ended)
    assert str(process.problem()).startswith("its supervisor failed: IsADirectoryError: ")
    assert "Traceback" in (tmp_path / "log.txt").read_text()
    assert capfd.readouterr() == ("", "")


def test_missing_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text('{"run_id": 1}')
    process = TrialProcess(task_of(tmp_path, 1), ["missing-program"], tmp_path, dict(os.environ), 60)
    wait_for(process.has_ended)
    assert "cannot be started: [Errno 2] No such file or directory: 'missing-program'" in str(process.problem())
    assert process.exit_status() == 127


def test_no_signals_are_blocked_in_a_run(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        wait_for(start_run(tmp_path, "grep SigBlk /proc/self/status > blocked").has_ended)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert int((tmp_path / "blocked").read_text().split()[1], base=16) == 0


IN_ITS_OWN_SESSION = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"


@pytest.mark.slow
@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize(
    "command",
    ["sleep 600; true", "trap '' TERM; sleep 600; true", f'"{sys.executable}" -c "{IN_ITS_OWN_SESSION}"; sleep 600'],
    ids=["of a shell", "deaf", "of another session"],
)
def test_run_without_supervisor_ends_with_its_last_process(command: str, detached: bool, tmp_path: Path) -> None:
    process = start_run(tmp_path, f"echo $PPID > supervisor; {command}", detached=detached, grace_s=1)
    wait_for(lambda: (tmp_path / "supervisor").exists() and bool((tmp_path / "supervisor").read_text()))
    mark = f"DET_LIGHTNING_RUN={tmp_path}/1"
    wait_for(lambda: len(processes_with(mark)) >= 3)
    orphan = OrphanedRun(tmp_path, 1, 60)
    os.kill(int((tmp_path / "supervisor").read_text()), signal.SIGKILL)
    wait_for(process.has_ended)
    assert processes_with(mark) == []
    assert orphan.has_ended()
    assert process.exit_status() is None


def test_later_process_with_the_same_id_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        holder = {"run": 1, "machine": identify_machine(), "supervisor": 0, "session": other.pid, "started": 0}
        (tmp_path / "lock").write_text(json.dumps(holder))
        assert OrphanedRun(tmp_path, 1, 60).has_ended()
        assert other.poll() is None
        other.kill()
