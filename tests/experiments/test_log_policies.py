"""Log policies: which line of a log cancels retries."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_lightning.config import read_config
from det_lightning.experiments.log_policies import find_retry_policy


def found(log: Path, *patterns: str) -> str | None:
    policies = [{"pattern": pattern, "action": {"type": "cancel_retries"}} for pattern in patterns]
    return find_retry_policy({"log_policies": policies}, log)


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
    assert find_retry_policy({"log_policies": policies}, log) == "ECC Error"
