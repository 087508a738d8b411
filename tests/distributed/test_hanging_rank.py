"""A rank that takes another path than the others: all log where they are, and SIGTERM ends all of them."""

from __future__ import annotations

import os
import re
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
    """Trainings whose second rank goes its own way at batch 5; in the first one the other rank comes later.

    In the last two one rank takes more than 8 s after a signal, and the other waits for it: for a checkpoint, even
    longer than the period, or for a batch.
    """
    arguments = ["--at", "5", "--rank", "1", "--end"]
    launcher = [*LAUNCHER, "--"]
    notice: Any = {"DET_LIGHTNING_WAIT_NOTICE_S": "2"}
    saving = ["sigterm-to-launcher", "--slow-save"]
    started = {
        "late": start(folder / "late", *arguments, "barrier", "--late-s", "4", launcher=TORCHRUN, **notice),
        "one rank": start(folder / "one rank", *arguments, "sleep", launcher=TORCHRUN, **notice),
        "lightning": start(folder / "lightning", *arguments, "barrier", "--trainer", "lightning", **notice),
        "saving": start(folder / "saving", *arguments, *saving, launcher=launcher, DET_LIGHTNING_WAIT_NOTICE_S="5"),
        "computing": start(folder / "computing", *arguments, "compute", launcher=launcher),
    }
    try:
        yield started
    finally:
        for process in started.values():
            process.kill()
        for one in [rank for training in started for rank in ranks_of(folder / training)]:
            one.kill()


@pytest.mark.parametrize(
    ("training", "elsewhere"), [("late", "in barrier"), ("one rank", "time.sleep(600)"), ("lightning", "in barrier")]
)
def test_hanging_ranks_log_stacks_and_end(hanging: dict[str, Any], folder: Path, training: str, elsewhere: str) -> None:
    process = hanging[training]
    missing = {"Rank 0 has spent", "Rank 1 has spent", "s on a batch, after 5 batches:", "in backward", elsewhere}
    while missing:
        line = read_until(process, "")
        missing = {text for text in missing if text not in line}
    ranks = ranks_of(folder / training)
    assert len(ranks) == 2
    (ranks[0] if training == "one rank" else process).send_signal(signal.SIGTERM)
    ended = wait(process)
    assert ended.status != 0
    # After 30 s torchrun kills those that have not ended, and says so.
    assert "SIGKILL" not in ended.output
    # The other rank says the same, or has lost its connection.
    assert re.search(r"received SIGTERM\. Rank \d .* has since spent \d+ s on a batch, and ends", ended.output)
    assert training != "one rank" or "exitcode  : 143" in ended.output
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.parametrize("training", ["saving", "computing"])
def test_saving_or_computing_rank_goes_on(hanging: dict[str, Any], folder: Path, training: str) -> None:
    ended = wait(hanging[training], 180)
    assert ended.status == 75, ended.output
    storage = CheckpointStorage(folder / training / "checkpoints")
    assert [storage.info(name).metadata["steps_completed"] for name in storage.list_ids()] == [8]
