"""Log policies: which line of a log cancels retries, and that no pattern stops the runner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from det_lightning.config import read_config
from det_lightning.experiments.log_policies import find_retry_policy
from tests.experiments.running import wait_for


def found(log: Path, *patterns: str, **kwargs: Any) -> str | None:
    policies = [{"pattern": pattern, "action": {"type": "cancel_retries"}} for pattern in patterns]
    return find_retry_policy({"log_policies": policies}, log, **kwargs)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [("is broken", True), (".*is broken", True), (".*.*is b.*n$", True), (".*?broken", True), ("^is", False)],
)
def test_pattern_may_match_anywhere_in_a_line(pattern: str, matches: bool, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(b"fine\n\xffCUDA is broken\n")
    assert found(log, "nothing", pattern) == (pattern if matches else None)
    assert found(tmp_path / "missing.txt", pattern) is None


def test_default_policies_are_fast(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("x" * 2_000_000 + " uncorrectable ECC error encountered")
    policies = read_config("entrypoint: m:T\n", partial=True).as_dict()["log_policies"]
    policies = [{**policy, "action": "cancel_retries"} for policy in policies]
    # A pattern that begins again at every character would take hours.
    assert find_retry_policy({"log_policies": policies}, log, limit_s=120) == "ECC Error"


def test_failed_search_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "log.txt"
    log.write_text("a" * 100 + "!\n")
    assert found(log, "(a+)+$", limit_s=0.5) is None
    assert caplog.messages == [f"Searching {log} for the log policies takes over 0.5 s: (a+)+$. No policy is applied."]
    assert found(tmp_path, "a") is None
    warning = caplog.messages[-1]
    assert warning.startswith(f"Searching {tmp_path} for the log policies ended with status 1: ")
    assert warning.endswith("No policy is applied.")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="it has no process groups with signals")
def test_ctrl_c_does_not_end_a_search(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("a" * 100 + "!\n")
    code = f"""
import pathlib, signal
from det_lightning.experiments.log_policies import find_retry_policy
signal.signal(signal.SIGINT, lambda *_: print("pausing", flush=True))
policy = {{"pattern": "(a+)+$", "action": "cancel_retries"}}
print("searching", flush=True)
find_retry_policy({{"log_policies": [policy]}}, pathlib.Path({str(log)!r}), limit_s=3)
"""
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "searching\n"
        search = psutil.Process(process.pid).children
        wait_for(lambda: any(os.getsid(child.pid) == child.pid for child in search()))
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        output, error = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "pausing\n")
    assert "takes over 3 s: (a+)+$. No policy is applied." in error
