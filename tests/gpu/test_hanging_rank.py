"""A rank that takes another path than the others with NCCL; as tests/distributed/test_hanging_rank.py with gloo."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.launching import TORCHRUN, read_until, start, wait

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two processes")
def test_a_line_says_who_waits_and_sigterm_ends_all_ranks(tmp_path: Path) -> None:
    arguments = ["--end", "sleep", "--at", "5", "--rank", "1", "--backend", "nccl"]
    process = start(tmp_path, *arguments, launcher=TORCHRUN, DET_LIGHTNING_WAIT_NOTICE_S="2")
    line = read_until(process, " s in ")
    assert "Rank 0 has " in line
    assert "rank 1 has been" in line
    process.send_signal(signal.SIGTERM)
    ended = wait(process)
    assert ended.status != 0
    assert "received SIGTERM. No rank moves." in ended.output
