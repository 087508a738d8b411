"""Counts what a report of several processes costs: collectives and bytes of each rank.

    python benchmarks/report_traffic.py [--sizes 2,4,8,16]

A report has 100 batches with 10 metrics (float32) and says whether a rank wants to stop. Processes are connected by
gloo; for comparison, without a process group, where objects go through the store of rank 0. Bytes are those that the
kernel has sent and received on all TCP connections of the process, of the rank with the most. Needs Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from det_lightning.core import DistributedContext
from det_lightning.engine.metrics import RankExchange, average_over_ranks

BATCHES = 100
METRICS = 10
REPORTS = 10
SIZES = (2, 4, 8, 16)
# Offsets of bytes_acked and bytes_received in Linux's struct tcp_info.
TCP_INFO_BYTES = 120


@dataclasses.dataclass
class Traffic:
    """What one report costs the rank with the most of each; the median over reports."""

    collectives: float
    bytes_sent: float
    bytes_received: float
    through_store: float
    wall_ms: float


class Counter(TorchDispatchMode):
    """Counts the collectives of this rank, and its exchanges through the store."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = 0
        self.through_store = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.collectives += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))

    def profile(self, frame: Any, event: str, argument: Any) -> None:
        """Count an exchange through the store; for ``sys.setprofile``."""
        if event == "call" and frame.f_globals.get("__name__") == "det_lightning.ranks.exchange":
            self.through_store += frame.f_code.co_name == "_take_part"


def bytes_of_process() -> np.ndarray[Any, Any]:
    """Return how many bytes this process has sent and received on its open TCP connections."""
    total = np.zeros(2, np.int64)
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # not a TCP connection, or closed since
            if not path.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as opened:
                info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES + 16)
                total += struct.unpack_from("=QQ", info, TCP_INFO_BYTES)
    return total


def window_of(rank: int) -> list[dict[str, Any]]:
    random = np.random.RandomState(rank)
    return [
        {f"metric{index}": np.array(random.randn(), np.float32) for index in range(METRICS)} for _ in range(BATCHES)
    ]


def report(rank: int, size: int, folder: Path, port: int, grouped: bool, results: Any) -> None:
    """Report several times, and put what each report took."""
    if grouped:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'group'}", rank=rank, world_size=size)
    context = DistributedContext(
        rank=rank, size=size, local_rank=rank, local_size=size, cross_rank=0, cross_size=1, pub_port=port
    )
    exchange = RankExchange(context)
    average_over_ranks(window_of(rank), exchange, 0)
    window = window_of(rank)
    found = []
    for _ in range(REPORTS):
        context.allgather(None)
        counter = Counter()
        time.sleep(0.05)  # the bytes of the exchange before have been acknowledged
        before = bytes_of_process()
        with counter:
            sys.setprofile(counter.profile)
            average_over_ranks(window, exchange, 0)
            sys.setprofile(None)
        time.sleep(0.05)
        sent, received = (bytes_of_process() - before).tolist()
        found.append((counter.collectives, sent, received, counter.through_store))
    context.allgather(None)
    begun = time.perf_counter()
    for _ in range(REPORTS):
        average_over_ranks(window, exchange, 0)
    wall_ms = (time.perf_counter() - begun) / REPORTS * 1e3
    results.put(([statistics.median(column) for column in zip(*found, strict=True)], wall_ms))
    results.close()
    results.join_thread()
    context.close()
    if grouped:
        dist.destroy_process_group()


def measure(size: int, grouped: bool) -> Traffic:
    """Return what a report costs in this many processes, which are forked."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    forking = multiprocessing.get_context("fork")
    results = forking.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, Path(folder), port, grouped, results)
        ranks = [forking.Process(target=report, args=(rank, *arguments)) for rank in range(size)]
        for process in ranks:
            process.start()
        found = [results.get(timeout=600) for _ in ranks]
        for process in ranks:
            process.join()
    most = [max(column) for column in zip(*(figures for figures, _ in found), strict=True)]
    return Traffic(*most, wall_ms=max(wall_ms for _, wall_ms in found))


def figures(short: bool = False) -> dict[str, float]:
    """Return collectives and bytes of a report in 2 and 16 processes; a short run leaves out the latter."""
    with Counter():
        torch.zeros(1).clone()  # imports what each process would import
    counted = {size: measure(size, grouped=True) for size in ((2,) if short else (2, 16))}
    return {
        f"{size}_ranks/{name}": getattr(traffic, name)
        for size, traffic in counted.items()
        for name in ("collectives", "bytes_sent")
    }


def table(sizes: list[int]) -> str:
    """Return a table in Markdown; wall time stands in it for 2 processes only."""
    with Counter():
        torch.zeros(1).clone()
    lines = [
        "| processes | connected by | collectives | bytes sent | bytes received | through the store | ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for grouped in (True, False):
        for size in sizes:
            found = measure(size, grouped)
            of_bytes = f"{found.bytes_sent:,.0f} | {found.bytes_received:,.0f}"
            wall = f"{found.wall_ms:.2f}" if size == 2 else ""
            by = "gloo" if grouped else "the store"
            counts = f"{found.collectives:.0f} | {of_bytes} | {found.through_store:.0f}"
            lines.append(f"| {size} | {by} | {counts} | {wall} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    print(table([int(size) for size in parser.parse_args().sizes.split(",")]))


if __name__ == "__main__":
    main()
