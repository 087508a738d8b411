"""What is said of ranks that wait for each other, and which signals are seen where no handler can run."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from det_lightning.core import DistributedContext
from det_lightning.ranks.signals import signal_log
from det_lightning.ranks.watch import NOTICE_VARIABLE, RankStatus, describe_wait
from tests.ranks.ranks import on_ranks

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")


@pytest.mark.slow
def test_a_rank_that_waits_long_is_reported_once_with_the_lines_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(NOTICE_VARIABLE, "1.5")
    is_reported = threading.Event()

    def note(record: logging.LogRecord) -> bool:
        if " s in " in record.getMessage():
            is_reported.set()
        return True

    caplog.handler.addFilter(note)

    def do(context: DistributedContext) -> list[int]:
        context.name_progress(lambda: f"after {context.rank} batches")
        if context.rank == 1:
            is_reported.wait(60)
            time.sleep(2)  # a second report would be due
        return context.allgather(context.rank)

    with caplog.at_level(logging.WARNING):
        assert on_ranks(1, 2, do) == [[0, 1]] * 2
    (message,) = [record.message for record in caplog.records if " s in " in record.message]
    here, there = message.split("; ")
    assert re.match(r"Rank 0 has waited \d+ s in do \(", here)
    assert "test_watch.py:" in here
    assert here.endswith(") > allgather, after 0 batches, for rank 1")
    assert there.startswith("rank 1 has been ")
    assert there.endswith(") > wait, after 1 batches.")


def join_late(context: DistributedContext) -> None:
    time.sleep(1.5 * context.rank)
    context.allgather(context.rank)


@pytest.mark.slow
@pytest.mark.parametrize("period", ["0", "30"])
def test_no_line_where_it_is_turned_off_or_not_due(
    period: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(NOTICE_VARIABLE, period)
    on_ranks(1, 2, join_late)
    assert not [record for record in caplog.records if " s in " in record.message]


@pytest.mark.parametrize("period", ["-1", "inf", "nan", "one minute"])
def test_a_period_that_is_not_a_number_of_seconds_is_refused(period: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTICE_VARIABLE, period)
    with pytest.raises(ValueError, match=f"{NOTICE_VARIABLE} must be a number of seconds.*got '{period}'"):
        DistributedContext(rank=0, size=2, local_rank=0, local_size=2, cross_rank=0, cross_size=1)


def status(
    rank: int, where: str, waits: bool = True, still_s: float = 60.0, awaited: list[int] | None = None
) -> RankStatus:
    return RankStatus(rank, 1, where, waits, still_s, stuck=False, awaited=awaited or [])


@pytest.mark.parametrize(
    ("statuses", "silent", "sentence"),
    [
        (
            [status(0, "A > allgather", awaited=[2]), status(1, "A > allgather"), status(2, "B > gather")],
            set(),
            "Ranks 0, 1 have waited 60 s in A > allgather, for rank 2; rank 2 has waited 60 s in B > gather.",
        ),
        (
            [status(0, "A > backward"), status(1, "B", waits=False, still_s=0.2), status(2, "B")],
            {2},
            "Rank 0 has waited 60 s in A > backward, for ranks 1, 2; rank 1 is in B; nothing is heard of rank 2.",
        ),
        (
            [status(0, "A", waits=False), status(1, "A", waits=False)],
            set(),
            "Ranks 0, 1 have been 60 s in A, where all ranks are.",
        ),
    ],
)
def test_a_sentence_names_all_ranks_by_their_places(
    statuses: list[RankStatus], silent: set[int], sentence: str
) -> None:
    assert describe_wait(statuses[0], statuses, silent) == sentence


@pytest.fixture
def handled() -> Iterator[None]:
    """A handler in Python for SIGUSR1, and a log of signals."""
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    assert signal_log.open()
    yield
    signal_log.close()
    signal.signal(signal.SIGUSR1, before)


@posix
def test_a_signal_is_seen_and_that_of_a_fork_is_not(handled: None) -> None:
    assert signal_log.first_of((signal.SIGUSR1,)) is None
    if not (child := os.fork()):
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(0)
    os.waitpid(child, 0)
    assert signal_log.first_of((signal.SIGUSR1,)) is None
    os.kill(os.getpid(), signal.SIGUSR1)
    found = signal_log.first_of((signal.SIGTERM, signal.SIGUSR1))
    assert found is not None
    assert found[0] == signal.SIGUSR1
    assert signal_log.first_of((signal.SIGTERM,)) is None


@posix
def test_what_uses_the_descriptor_of_signals_already_keeps_it() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    try:
        assert signal_log.open()
        signal_log.close()
        assert signal.set_wakeup_fd(-1) == write_end
    finally:
        signal.set_wakeup_fd(-1)
        os.close(read_end)
        os.close(write_end)
    assert signal_log.open()
    signal_log.close()
    assert signal.set_wakeup_fd(-1) == -1
