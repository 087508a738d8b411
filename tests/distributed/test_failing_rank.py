"""An exception on one rank ends all of them, soon, and with its message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching import TORCHRUN, start, wait

pytestmark = pytest.mark.slow

#: Starting takes its time too.
START_S = 120  # for several processes that import torch, on a busy machine
END_S = 30


@pytest.mark.parametrize("end", ["error", "invalid-hp"])
def test_an_exception_on_one_rank_ends_all_ranks(end: str, tmp_path: Path) -> None:
    """Under either Trainer at once: torchrun, and Lightning's own launcher, under which an InvalidHP leaves ``fit``."""
    trainers = {"determined": TORCHRUN, "lightning": []}
    arguments = ["--end", end, "--at", "5", "--rank", "1"]
    started = {
        trainer: start(tmp_path / trainer, "--trainer", trainer, *arguments, launcher=launcher)
        for trainer, launcher in trainers.items()
    }
    for trainer, process in started.items():
        ended = wait(process, START_S + END_S)
        ends_well = (end, trainer) == ("invalid-hp", "determined")
        assert (ended.status == 0) is ends_well, ended.output
        assert "the culprit's message" in ended.output


def test_lightnings_main_process_ends_the_others(tmp_path: Path) -> None:
    torchrun = start(tmp_path / "torchrun", "--trainer", "lightning", "--end", "error", "--at", "5", launcher=TORCHRUN)
    lightning = start(tmp_path / "lightning", "--trainer", "lightning", "--end", "error", "--at", "5")
    # Their output ends when the last process has.
    for process in (lightning, torchrun):
        ended = wait(process, START_S + END_S)
        assert ended.status != 0, ended.output
        assert "the culprit's message" in ended.output


def test_torchrun_names_the_first_failure(tmp_path: Path) -> None:
    """The other rank fails too, because of it, in a collective or in an exchange of objects."""
    ends = {
        "determined": ["--end", "error"],
        "lightning": ["--end", "error", "--trainer", "lightning"],
        "killed": ["--end", "sigkill"],
    }
    started = {
        name: start(tmp_path / name, *end, "--at", "5", "--rank", "1", launcher=TORCHRUN) for name, end in ends.items()
    }
    for name, process in started.items():
        ended = wait(process, START_S + END_S)
        assert ended.status != 0, ended.output
        _, report = ended.output.split("Root Cause (first observed failure):")
        assert re.findall(r" rank +: (\d)", report) == ["1"], ended.output
        assert ("Signal 9" if name == "killed" else "ValueError: the culprit's message") in report
