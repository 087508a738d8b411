"""Ranks of a process group of gloo, each a process that is forked from the one of the tests."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from det_lightning.core import DistributedContext
from tests.ranks.ranks import free_port, numbers


def _run(
    do: Callable[[DistributedContext], Any], rank: int, size: int, folder: Path, port: int, timeout_s: float, queue: Any
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'group'}", rank=rank, world_size=size)
    context = DistributedContext(**numbers(rank, 1, size), pub_port=port, timeout_s=timeout_s)
    try:
        found = do(context)
    except Exception as error:
        found = error
    queue.put((rank, found))
    queue.close()
    queue.join_thread()
    context.close()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(60)  # it keeps the store for the other ranks
    os._exit(0)  # the group of a rank that has failed would wait for the others


def in_processes(
    size: int, folder: Path, do: Callable[[DistributedContext], Any], timeout_s: float = 300.0
) -> list[Any]:
    """Run the function on every rank; return its results, or the errors it raised."""
    forking = multiprocessing.get_context("fork")
    queue = forking.Queue()
    port = free_port()
    ranks = [
        forking.Process(target=_run, args=(do, rank, size, folder, port, timeout_s, queue)) for rank in range(size)
    ]
    # A forked process that collects an object of an earlier test would join a thread that it has not got.
    gc.collect()
    gc.freeze()
    for process in ranks:
        process.start()
    gc.unfreeze()
    found = sorted((queue.get(timeout=300) for _ in range(size)), key=lambda one: one[0])
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0] * size
    return [result for _, result in found]
