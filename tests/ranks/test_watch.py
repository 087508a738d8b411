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
from det_lightning.ranks.watch import NOTICE_VARIABLE
from tests.ranks.ranks import on_ranks

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")


@pytest.mark.slow
def test_still_rank_logs_its_stack_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(NOTICE_VARIABLE, "1.5")
    is_logged = threading.Event()

    def note(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("Rank 1 has"):
            is_logged.set()
        return True

    caplog.handler.addFilter(note)

    def do(context: DistributedContext) -> list[int]:
        context.name_progress(lambda: f"after {context.rank} batches")
        if context.rank == 1:
            is_logged.wait(60)
            time.sleep(2)  # elsewhere, so this is logged, too
        return context.allgather(context.rank)

    with caplog.at_level(logging.WARNING):
        assert on_ranks(1, 2, do) == [[0, 1]] * 2
    waiting, first, second = sorted(record.message for record in caplog.records if record.message.startswith("Rank "))
    assert re.match(r"Rank 0 has waited \d+ s for rank 1, after 0 batches:\n", waiting)
    assert "return context.allgather(context.rank)" in waiting
    assert re.match(r"Rank 1 has been here for \d+ s, after 1 batches:\n", first)
    assert {"is_logged.wait(60)" in first, "is_logged.wait(60)" in second} == {True, False}


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


@pytest.fixture
def handled() -> Iterator[None]:
    """Handlers in Python for SIGTERM and SIGUSR1, and a log of signals."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, lambda number, frame: None) for number in numbers]
    assert signal_log.open()
    yield
    signal_log.close()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@posix
def test_first_signal_is_seen_but_not_a_forks(handled: None) -> None:
    if not (child := os.fork()):
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    os.waitpid(child, 0)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signal_log.first() is None
    os.kill(os.getpid(), signal.SIGTERM)
    found = signal_log.first()
    assert found is not None
    assert found[0] == signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal_log.first() == found


@posix
def test_used_wakeup_descriptor_stays() -> None:
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
