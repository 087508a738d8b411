"""Ranks of a run as threads, which really exchange their objects."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from det_lightning.core import DistributedContext

TIMEOUT_S = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


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
    port = free_port()

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
