"""A rank that takes another path than the others with NCCL; as tests/distributed/test_hanging_rank.py with gloo."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.launching import TORCHRUN, read_until, start, wait

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two processes")
def test_ranks_that_do_not_move_log_where_they_are_and_sigterm_ends_them(tmp_path: Path) -> None:
    arguments = ["--end", "sleep", "--at", "5", "--rank", "1", "--backend", "nccl"]
    process = start(tmp_path, *arguments, launcher=TORCHRUN, DET_LIGHTNING_WAIT_NOTICE_S="2")
    missing = {"Rank 0 has ", "Rank 1 has ", "time.sleep(600)"}
    while missing:
        line = read_until(process, "")
        missing = {text for text in missing if text not in line}
    process.send_signal(signal.SIGTERM)
    ended = wait(process)
    assert ended.status != 0
    assert "received SIGTERM. Rank 1 " in ended.output
