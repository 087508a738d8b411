"""A rank that waits in a collective of tensors learns of the others what it would learn in an exchange of objects."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from det_lightning.core import DistributedContext
from tests.distributed.group_ranks import in_processes

pytestmark = pytest.mark.slow


def exchange(context: DistributedContext) -> list[float]:
    """Return the number of each rank, in a collective that is called "sum"."""
    tensor = torch.ones(1)
    context.wait_for(dist.all_reduce(tensor, async_op=True), "sum")
    return tensor.tolist()


def test_collectives_and_objects_take_turns(tmp_path: Path) -> None:
    def do(context: Any) -> list[Any]:
        found: list[Any] = []
        for turn in range(6):
            if (context.rank, turn) == (1, 3):
                time.sleep(2.5)  # the other ranks announce that they wait
            found += exchange(context)
            if turn % 2:
                found.append(context.allgather(turn))
        context.allgather(None)
        dist.barrier()
        found.append(context._session.store.num_keys())
        dist.barrier()
        return found

    first, *others = in_processes(3, tmp_path, do)
    assert first == [3.0, 3.0, [1, 1, 1], 3.0, 3.0, [3, 3, 3], 3.0, 3.0, [5, 5, 5], first[-1]]
    assert others == [first] * 2


@pytest.mark.parametrize(
    ("leaves", "timeout_s", "messages"),
    [
        (True, 300.0, ["Rank 0 is in sum(), but rank 1 takes part no more", "the culprit's message"]),
        (False, 2.0, ["sum() of rank 0 has waited 2 s for rank 1."]),
    ],
)
def test_missing_rank_is_named(leaves: bool, timeout_s: float, messages: list[str], tmp_path: Path) -> None:
    def do(context: DistributedContext) -> Any:
        if context.rank == 1:
            if leaves:
                context.abandon(ValueError("the culprit's message"))
            return is_noticed.wait(60)
        try:
            return exchange(context)
        finally:
            is_noticed.set()

    is_noticed = multiprocessing.get_context("fork").Event()
    error, _ = in_processes(2, tmp_path, do, timeout_s)
    assert [message for message in messages if message not in str(error)] == [], error


def test_rank_elsewhere_is_named(tmp_path: Path) -> None:
    def do(context: DistributedContext) -> Any:
        return context.allgather(1) if context.rank == 1 else exchange(context)

    errors = list(map(str, in_processes(2, tmp_path, do)))
    assert all("rank 0 sum(), rank 1 allgather()" in error for error in errors)


def test_a_rank_that_is_killed_ends_the_waiting(tmp_path: Path) -> None:
    def do(context: DistributedContext) -> Any:
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(context)

    (error,) = in_processes(2, tmp_path, do, killed=1)
    assert "Rank 0 is in sum(), and has lost" in str(error)
