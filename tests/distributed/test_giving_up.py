"""InvalidHP on one rank of several is reported to the experiment, and ends all ranks well, wherever it is raised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.warm_python import WarmPython

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("giving_up.py")


@pytest.mark.parametrize(
    ("strategy", "cases"),
    [
        ("trial_ddp", ["1:__init__", "0:train_batch", "1:reducer", "1:on_checkpoint_upload_end"]),
        ("trial_fsdp", ["1:train_batch", "0:evaluate_batch"]),
    ],
)
def test_whichever_rank_gives_up_all_end_well(
    strategy: str, cases: list[str], warm_python: WarmPython, tmp_path: Path
) -> None:
    ended = warm_python.run(SCRIPT, strategy, *cases, cwd=tmp_path)
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [case["case"] for case in found] == cases, ended.stderr
    for case in found:
        assert (case["statuses"], case["reports"]) == ([0, 0], ["INVALID_HP"]), case
        assert all("the culprit's message" in output for output in case["outputs"])
