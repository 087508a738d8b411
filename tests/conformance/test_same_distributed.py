"""The ranks of a run exchange the same objects as with the real context."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest

from tests.conformance.sides import SIDES

LAYOUTS = [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (2, 2)]  # nodes, processes on each


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listening.getsockname()[1] for listening in sockets]


def on_ranks(side: str, nodes: int, per_node: int, do: Callable[[Any], Any]) -> list[Any]:
    core = importlib.import_module(f"{side}.core")
    pub_port, pull_port = free_ports(2)

    def on_rank(rank: int) -> Any:
        context = core.DistributedContext(
            rank=rank,
            size=nodes * per_node,
            local_rank=rank % per_node,
            local_size=per_node,
            cross_rank=rank // per_node,
            cross_size=nodes,
            chief_ip="127.0.0.1",
            pub_port=pub_port,
            pull_port=pull_port,
            force_tcp=True,
        )
        with contextlib.closing(context):
            result = do(context)
            context.gather(None)  # the real one may close before others have read its last broadcast
            return result

    with ThreadPoolExecutor(nodes * per_node) as pool:
        return list(pool.map(on_rank, range(nodes * per_node)))


OPERATIONS = ["gather", "allgather", "broadcast", "gather_local", "allgather_local", "broadcast_local"]
NUMBERS = ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"]


@pytest.mark.parametrize(("nodes", "per_node"), LAYOUTS)
def test_operations_and_numbers_are_the_same(nodes: int, per_node: int) -> None:
    def do(context: Any) -> list[Any]:
        stuff = [context.rank, None, {"rank": context.rank, "data": b"x" * 5000}, (context.local_rank, 1.5)]
        exchanged = [getattr(context, operation)(mine) for operation in OPERATIONS for mine in stuff]
        told = [context.get_rank(), context.get_local_rank(), context.get_size(), context.get_num_agents()]
        return [exchanged, told, [getattr(context, name) for name in NUMBERS]]

    real, ours = (on_ranks(side, nodes, per_node, do) for side in SIDES)
    assert ours == real


def test_the_same_objects_are_copies() -> None:
    def do(context: Any) -> list[list[bool]]:
        copied = []
        for operation in OPERATIONS[:-1]:
            mine = [context.rank]
            found = getattr(context, operation)(mine)
            copied.append([one is mine for one in (found if isinstance(found, list) else [found])] + [found is mine])
        return copied

    real, ours = (on_ranks(side, 1, 3, do) for side in SIDES)
    assert ours == real


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
DEEPSPEED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


@pytest.mark.parametrize(("method", "names"), [("from_torch_distributed", TORCHRUN), ("from_deepspeed", DEEPSPEED)])
def test_the_same_variables_are_read(method: str, names: tuple[str, ...]) -> None:
    alone, two_nodes = dict(zip(names, "010101", strict=True)), dict(zip(names, "020102", strict=True))
    for side in SIDES:
        context_class = importlib.import_module(f"{side}.core").DistributedContext
        with mock.patch.dict(os.environ, alone):
            assert getattr(context_class, method)().get_size() == 1
        with mock.patch.dict(os.environ, two_nodes), pytest.raises(AssertionError, match="chief_ip"):
            getattr(context_class, method)()


@pytest.mark.parametrize("missing", NUMBERS)
def test_all_numbers_are_asked_for(missing: str) -> None:
    numbers = dict(zip(NUMBERS, (0, 1) * 3, strict=True))
    for side in SIDES:
        context_class = importlib.import_module(f"{side}.core").DistributedContext
        with pytest.raises(ValueError, match=missing):
            context_class(**{**numbers, missing: None})
