"""Log policies: which line of a log cancels retries, and that no pattern stops the runner."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from det_lightning.config import read_config
from det_lightning.experiments.log_policies import policy_against_retries


def found(log: Path, *patterns: str, **kwargs: Any) -> str | None:
    policies = [{"pattern": pattern, "action": {"type": "cancel_retries"}} for pattern in patterns]
    return policy_against_retries({"log_policies": policies}, log, **kwargs)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [("is broken", True), (".*is broken", True), (".*.*is b.*n$", True), (".*?broken", True), ("^is", False)],
)
def test_a_pattern_may_match_anywhere_in_a_line(pattern: str, matches: bool, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(b"fine\n\xffCUDA is broken\n")
    assert found(log, "nothing", pattern) == (pattern if matches else None)
    assert found(tmp_path / "missing.txt", pattern) is None


def test_the_policies_that_are_set_by_default_take_no_time_for_a_long_line(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("x" * 2_000_000 + " uncorrectable ECC error encountered")
    policies = read_config("entrypoint: m:T\n", partial=True).as_dict()["log_policies"]
    policies = [{**policy, "action": "cancel_retries"} for policy in policies]
    began = time.monotonic()
    assert policy_against_retries({"log_policies": policies}, log) == "ECC Error"
    assert time.monotonic() - began < 30


def test_a_pattern_that_takes_too_long_is_given_up_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log.txt"
    log.write_text("a" * 100 + "!\n")
    assert found(log, "(a+)+$", limit_s=0.5) is None
    assert caplog.messages == [f"Searching {log} for the log policies takes over 0.5 s: (a+)+$. None is applied."]
