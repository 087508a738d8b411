"""The logs of trials: the lines of all nodes, the error at the end, and the lines that cancel retries."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_lightning.config import read_config
from det_lightning.experiments.log_policies import find_retry_policy
from det_lightning.experiments.node_logs import copy_node_logs
from det_lightning.files.logs import find_error


def test_lines_of_all_nodes_are_copied_once(tmp_path: Path) -> None:
    logs = [tmp_path / "nodes" / str(rank) / "log.txt" for rank in range(2)]
    for log in logs:
        log.parent.mkdir(parents=True)
    logs[0].write_text("begins\n[rank=1] trains\nno end")
    copy_node_logs(tmp_path, ended=False)
    logs[1].write_text("\n\rhalf\n")
    for _ in range(2):
        copy_node_logs(tmp_path, ended=False)
    with logs[0].open("a") as file:
        file.write(" yet")
    for _ in range(2):
        copy_node_logs(tmp_path, ended=True)
    assert (tmp_path / "log.txt").read_bytes() == (
        b"[node=0] begins\n[rank=1] trains\n[node=1] \n[node=1] \rhalf\n[node=0] no end yet\n"
    )


def test_trial_on_one_node_has_nothing_to_copy(tmp_path: Path) -> None:
    copy_node_logs(tmp_path, ended=True)
    assert list(tmp_path.iterdir()) == []


TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n'
TORCHRUN = """{0}torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=======
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  traceback : {1}
=======
"""
IN_SUMMARY = 'Traceback (most recent call last):\n    File "a.py", line 3, in f\n      g()\n  ValueError: of a rank\n'


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (f"a\n{TRACEBACK}ValueError: two\nlines\nafterwards\n", "ValueError: two"),
        (f"{TRACEBACK}KeyError: 1\n\nDuring handling:\n\n{TRACEBACK}a.b.Error: 2\n", "a.b.Error: 2"),
        ("".join(f"[rank=1] {line}\n" for line in f"{TRACEBACK}KeyError: 1".splitlines()), "KeyError: 1"),
        (TORCHRUN.format(TRACEBACK, IN_SUMMARY), "ValueError: of a rank"),
        (TRACEBACK + "OSError: 1\n" + TORCHRUN.format(TRACEBACK, "To enable traceback see: http"), "OSError: 1"),
        ("", ""),
    ],
)
def test_logs_end_with_an_error(log: str, expected: str) -> None:
    assert find_error(log) == expected


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
