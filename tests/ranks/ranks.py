"""Ranks of a run that really exchange their objects: as threads, or as processes of a group of gloo."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from det_lightning.core import DistributedContext
from det_lightning.ranks.topology import free_port

TIMEOUT_S = 60.0


def numbers(rank: int, nodes: int, per_node: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "size": nodes * per_node,
        "local_rank": rank % per_node,
        "local_size": per_node,
        "cross_rank": rank // per_node,
        "cross_size": nodes,
        "chief_ip": "127.0.0.1",
    }


def meet(rank: int, port: int, size: int = 2, timeout_s: float = TIMEOUT_S, **changes: Any) -> DistributedContext:
    """Return the context of a rank on one node, or as the changes say."""
    return DistributedContext(**{**numbers(rank, 1, size), "pub_port": port, "timeout_s": timeout_s, **changes})


def in_threads(ranks: Iterable[int], do: Callable[[int], Any]) -> list[Any]:
    """Run the function for every rank, each in a thread; return its results."""
    ranks = list(ranks)
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(do, ranks))


def on_ranks(
    nodes: int, per_node: int, do: Callable[[DistributedContext], Any], timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Run the function with the context of every rank; return its results, or the errors it raised."""
    port = free_port("127.0.0.1")

    def on_rank(rank: int) -> Any:
        context = None
        try:
            context = meet(port=port, timeout_s=timeout_s, **numbers(rank, nodes, per_node))
            return do(context)
        except Exception as error:
            return error
        finally:
            if context is not None:
                context.close()

    return in_threads(range(nodes * per_node), on_rank)


def start_forked(size: int, target: Callable[..., None], *arguments: Any) -> list[Any]:
    """Start a process for each rank, which is forked from this one, and calls the function with its rank first."""
    forking = multiprocessing.get_context("fork")
    processes = [forking.Process(target=target, args=(rank, *arguments)) for rank in range(size)]
    # A forked process that collects an object of an earlier test would join a thread that it has not got.
    gc.collect()
    gc.freeze()
    for process in processes:
        process.start()
    gc.unfreeze()
    return processes


def ends_of(processes: list[Any], timeout_s: float) -> list[int | None]:
    """Wait for the processes, kill those that have not ended in time, and return how each ended."""
    for process in processes:
        process.join(timeout_s)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def in_processes(
    size: int, folder: Path, do: Callable[[DistributedContext], Any], timeout_s: float = 300.0
) -> list[Any]:
    """Run the function on every rank of a process group; return its results, or the errors it raised."""
    queue = multiprocessing.get_context("fork").Queue()
    port = free_port("127.0.0.1")

    def run(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'group'}", rank=rank, world_size=size)
        context = meet(rank, port, size, timeout_s)
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

    processes = start_forked(size, run)
    found = sorted((queue.get(timeout=300) for _ in range(size)), key=lambda one: one[0])
    assert ends_of(processes, 60) == [0] * size
    return [result for _, result in found]
