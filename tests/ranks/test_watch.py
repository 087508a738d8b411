"""Ranks that wait for each other log where they are; after another rank gave up, a waiting rank ends."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import threading
import time

import pytest

from det_lightning.core import DistributedContext
from det_lightning.ranks.session import NOTICE_VARIABLE
from det_lightning.ranks.topology import free_port
from tests.launching import environment
from tests.ranks.ranks import on_ranks
from tests.warm_python import start_warm_python

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")


@pytest.mark.slow
def test_waiting_ranks_log_their_stacks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One rank waits in an exchange; the other is on a batch, and later elsewhere, which is no waiting."""
    monkeypatch.setenv(NOTICE_VARIABLE, "0.5")
    is_logged = threading.Event()

    def note(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("Rank 1 has"):
            is_logged.set()
        return True

    caplog.handler.addFilter(note)

    def do(context: DistributedContext) -> list[int]:
        context.name_progress(lambda: f"after {context.rank} batches")
        if context.rank == 1:
            with context.in_batches():
                is_logged.wait(60)
            time.sleep(3)
        return context.allgather(context.rank)

    with caplog.at_level(logging.WARNING):
        assert on_ranks(1, 2, do) == [[0, 1]] * 2
    waiting, *_, on_batch = sorted(record.message for record in caplog.records if record.message.startswith("Rank "))
    assert re.match(r"Rank 0 has waited \d+ s for rank 1, after 0 batches:\n", waiting)
    assert "return context.allgather(context.rank)" in waiting
    assert re.match(r"Rank 1 has spent \d+ s on a batch, after 1 batches:\n", on_batch)
    assert "is_logged.wait(60)" in on_batch
    assert "time.sleep(3)" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("period", ["0", "30"])
def test_no_notice_if_off_or_not_due(
    period: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(NOTICE_VARIABLE, period)

    def join_late(context: DistributedContext) -> None:
        time.sleep(1.5 * context.rank)
        context.allgather(context.rank)

    on_ranks(1, 2, join_late)
    assert not [record for record in caplog.records if record.message.startswith("Rank ")]


@pytest.mark.parametrize("period", ["-1", "inf", "nan", "one minute"])
def test_wrong_notice_period_is_refused(period: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTICE_VARIABLE, period)
    with pytest.raises(ValueError, match=f"{NOTICE_VARIABLE} must be a number of seconds.*got '{period}'"):
        DistributedContext(rank=0, size=2, local_rank=0, local_size=2, cross_rank=0, cross_size=1)


@posix
@pytest.mark.slow
def test_rank_stuck_on_a_batch_ends_after_another_gave_up() -> None:
    script = """
import sys, time
from det_lightning import InvalidHP
from tests.ranks.ranks import meet
rank, port = map(int, sys.argv[1:])
context = meet(rank, port, chief_ip=None)
with context.in_batches():
    if rank == 0:
        context.abandon(InvalidHP('why'))
        sys.exit()
    time.sleep(600)
"""
    command = [start_warm_python().executable, "-c", script]
    port = str(free_port())
    ranks = [
        subprocess.Popen([*command, rank, port], stderr=subprocess.PIPE, text=True, env=environment()) for rank in "01"
    ]
    _, output = (rank.communicate(timeout=120)[1] for rank in ranks)
    assert ranks[1].returncode == 0, output
    assert "rank 0 gave up on the hyperparameters (InvalidHP): why" in output
    assert "ends without saving" in output
