"""An exception on one rank ends all of them, soon, and with its message; after InvalidHP they end well."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.launching import TORCHRUN, Ended, start, wait
from tests.warm_python import WarmPython

pytestmark = pytest.mark.slow

#: Starting takes its time too.
START_S = 120  # for several processes that import torch, on a busy machine
END_S = 30

#: Trainings that end at batch 5: by which launcher, by which Trainer, how, and on which rank.
TRAININGS: dict[str, tuple[list[str], str, str, int]] = {
    "determined": (TORCHRUN, "determined", "error", 1),
    "torchrun": (TORCHRUN, "lightning", "error", 1),
    "killed": (TORCHRUN, "determined", "sigkill", 1),
    "lightning": ([], "lightning", "error", 1),
    "main process": ([], "lightning", "error", 0),
    "gave up": (TORCHRUN, "determined", "invalid-hp", 1),
    "gave up in lightning": ([], "lightning", "invalid-hp", 1),
}


def end(folder: Path, names: list[str]) -> dict[str, Ended]:
    """Return how trainings have ended that run at once; their output ends when the last process has."""
    started = {}
    for name in names:
        launcher, trainer, how, rank = TRAININGS[name]
        arguments = ["--trainer", trainer, "--end", how, "--at", "5", "--rank", str(rank)]
        started[name] = start(folder / name, *arguments, launcher=launcher)
    return {name: wait(process, START_S + END_S) for name, process in started.items()}


def test_an_exception_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    """Under Lightning's own launcher an InvalidHP leaves ``fit``."""
    for name, ended in end(tmp_path, ["lightning", "main process", "gave up", "gave up in lightning"]).items():
        if name != "gave up in lightning":  # the lost connection ends the other rank, or the watch does
            assert (ended.status == 0) is (name == "gave up"), ended.output
        assert "the culprit's message" in ended.output


def test_torchrun_names_the_first_failure(tmp_path: Path) -> None:
    """The other rank fails too, because of it, in a collective or in an exchange of objects."""
    for name, ended in end(tmp_path, ["determined", "torchrun", "killed"]).items():
        assert ended.status != 0, ended.output
        _, report = ended.output.split("Root Cause (first observed failure):")
        assert re.findall(r" rank +: (\d)", report) == ["1"], ended.output
        assert ("Signal 9" if name == "killed" else "ValueError: the culprit's message") in report


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
    """It is reported to the experiment, wherever it is raised."""
    ended = warm_python.run(Path(__file__).with_name("giving_up.py"), strategy, *cases, cwd=tmp_path)
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [case["case"] for case in found] == cases, ended.stderr
    for case in found:
        assert (case["statuses"], case["reports"]) == ([0, 0], ["INVALID_HP"]), case
        assert all("the culprit's message" in output for output in case["outputs"])
