"""A rank that takes another path than the others: a line says so, and SIGTERM ends all of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from det_lightning.checkpoint import CheckpointStorage
from tests.launching import LAUNCHER, TORCHRUN, read_until, start, wait

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")]


def ranks_of(folder: Path) -> list[psutil.Process]:
    """Return the processes of a training that live, in the order of their ranks."""
    found = [int(file.read_text()) for file in sorted(folder.glob("pid-*"))]
    return [psutil.Process(pid) for pid in found if psutil.pid_exists(pid)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hanging")


@pytest.fixture(scope="module")
def hanging(folder: Path) -> Iterator[dict[str, Any]]:
    """Three trainings whose second rank goes its own way at batch 5; in the first one the other rank comes later."""
    arguments = ["--at", "5", "--rank", "1"]
    notice: Any = {"DET_LIGHTNING_WAIT_NOTICE_S": "2"}
    started = {
        "late": start(folder / "late", *arguments, "--end", "barrier", "--late-s", "4", launcher=TORCHRUN, **notice),
        "one rank": start(folder / "one rank", *arguments, "--end", "sleep", launcher=TORCHRUN, **notice),
        "lightning": start(folder / "lightning", *arguments, "--end", "barrier", "--trainer", "lightning", **notice),
    }
    try:
        yield started
    finally:
        for process in started.values():
            process.kill()
        for one in [rank for training in started for rank in ranks_of(folder / training)]:
            one.kill()


@pytest.mark.parametrize(
    ("training", "elsewhere"),
    [("late", r"> barrier"), ("one rank", r"ending.py:"), ("lightning", r"> barrier")],
)
def test_a_line_says_who_waits_where_for_whom_and_sigterm_ends_all_ranks(
    hanging: dict[str, Any], folder: Path, training: str, elsewhere: str
) -> None:
    process = hanging[training]
    # Where the first rank is late, a line about the second one, which waits for it, comes before.
    line = read_until(process, "Rank 0 has waited")
    here, there = line.split("; ")
    for text in (" s in ", "> backward", "after 5 batches", "for rank 1"):
        assert text in here
    for text in ("rank 1 has", elsewhere, "after 5 batches"):
        assert text in there
    ranks = ranks_of(folder / training)
    assert len(ranks) == 2
    (ranks[0] if training == "one rank" else process).send_signal(signal.SIGTERM)
    ended = wait(process)
    assert ended.status != 0
    # After 30 s torchrun kills those that have not ended, and says so.
    assert "SIGKILL" not in ended.output
    assert "received SIGTERM. No rank moves." in ended.output
    assert not any(rank.is_running() for rank in ranks)


def test_a_checkpoint_that_takes_long_is_finished(tmp_path: Path) -> None:
    """The chief takes 8 s to save the run after the signal, and the other rank waits for it."""
    arguments = ["--slow-save", "--end", "sigterm-to-parent", "--at", "5", "--rank", "1"]
    ended = wait(start(tmp_path, *arguments, launcher=[*LAUNCHER, "--"], is_warm=False), 180)
    assert ended.status == 75, ended.output
    storage = CheckpointStorage(tmp_path / "checkpoints")
    assert [storage.read_metadata(name)["steps_completed"] for name in storage.list_ids()] == [8]
