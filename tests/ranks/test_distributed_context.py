"""Ranks that meet and exchange objects: as threads, as processes, under torchrun, with one that dies."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import TCPStore

from det_lightning.core import DistributedContext
from det_lightning.errors import InvalidHP
from det_lightning.ranks import session
from det_lightning.ranks.topology import free_port
from tests.launching import environment
from tests.ranks.ranks import TIMEOUT_S, ends_of, in_threads, meet, numbers, on_ranks, start_forked
from tests.warm_python import start_warm_python


@pytest.fixture(autouse=True)
def short_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chief whose other rank has died in a test need not wait long for it."""
    monkeypatch.setattr(session, "_LINGER_S", 3.0)
    monkeypatch.setattr(session, "_LINGER_AFTER_FAILURE_S", 1.0)


def errors(results: list[Any]) -> dict[int, str]:
    assert all(result is None or isinstance(result, RuntimeError) for result in results), results
    return {rank: str(result) for rank, result in enumerate(results) if result is not None}


lists_keys = pytest.mark.skipif(not hasattr(TCPStore, "list_keys"), reason="this torch cannot list a store's keys")


def store_of(context: DistributedContext) -> Any:
    """The whole store that the context uses a part of."""
    assert context._session is not None
    store: Any = context._session._shared_store
    return store.underlying_store


OPERATIONS = ["gather", "allgather", "broadcast", "gather_local", "allgather_local", "broadcast_local"]
objects = st.recursive(
    st.sampled_from([None, True, False, b"large" * 999])
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (1, 3), (1, 4), (2, 1), (2, 2)])
@settings(max_examples=4)
@given(data=st.data())
def test_objects_come_in_rank_order(data: st.DataObject, nodes: int, per_node: int) -> None:
    size = nodes * per_node
    from_ranks = st.lists(objects, min_size=size, max_size=size)
    some = data.draw(st.lists(st.tuples(st.sampled_from(OPERATIONS), from_ranks), max_size=8))
    calls = [*((operation, [*range(size)]) for operation in OPERATIONS), *some]

    def do(context: DistributedContext) -> list[Any]:
        return [getattr(context, operation)(stuff[context.rank]) for operation, stuff in calls]

    def expected(rank: int, operation: str, stuff: list[Any]) -> Any:
        first = rank // per_node * per_node if operation.endswith("_local") else 0
        group = stuff[first : first + per_node] if operation.endswith("_local") else stuff
        results = {"gather": group if rank == first else None, "allgather": group, "broadcast": group[0]}
        return results[operation.removesuffix("_local")]

    assert on_ranks(nodes, per_node, do) == [[expected(rank, *call) for call in calls] for rank in range(size)]


@pytest.mark.slow
@lists_keys
def test_large_objects_leave_the_store() -> None:
    large = os.urandom(1 << 20) * 50

    def do(context: DistributedContext) -> tuple[bool, list[str]]:
        got = context.broadcast(large if context.rank == 0 else None)
        everyone = context.allgather(large[: 9 << 20])
        gathered = context.gather(large[context.rank : 5 << 20])
        same = got == large and everyone == [large[: 9 << 20]] * 2
        same = same and (gathered is None or gathered == [large[: 5 << 20], large[1 : 5 << 20]])
        context.broadcast(None)
        return same, [key for key in store_of(context).list_keys() if "part" in key]

    assert on_ranks(1, 2, do) == [(True, []), (True, [])]


@pytest.mark.slow
def test_many_operations_leave_few_keys() -> None:
    def do(context: DistributedContext) -> list[int]:
        counts = []
        for _ in range(100):
            context.allgather(context.rank)
            context.broadcast_local("x" * 3000)
            context.gather(None)
            context.allgather_local("x" * 3000)
            context.allgather(None)
            counts.append(store_of(context).num_keys())
        return counts

    for counts in on_ranks(1, 2, do):
        # For each of two groups a counter, two keys of each of two rounds, and three of objects being read.
        assert max(counts) <= 16


# Numbers


def test_no_numbers_are_a_single_process() -> None:
    context = DistributedContext()
    of_node = (context.local_rank, context.local_size)
    assert [(context.rank, context.size), of_node, (context.cross_rank, context.cross_size)] == [(0, 1)] * 3
    assert [context.gather(1), context.allgather_local(1), context.broadcast(1)] == [[1], [1], 1]
    context.close()
    context.close()


@pytest.mark.parametrize(
    ("given", "error", "texts"),
    [
        ({"rank": 0, "size": 2}, ValueError, ["got only rank=0", "local_rank, local_size, cross_rank, cross_size"]),
        (
            {**numbers(0, 4, 2), "rank": 4, "size": 4, "local_rank": -1, "timeout_s": 0},
            ValueError,
            ["rank=4, size=4", "local_rank=-1", "of cross_size=4 nodes", "timeout_s=0"],
        ),
        ({**numbers(0, 2, 1), "chief_ip": None}, AssertionError, ["chief_ip"]),
        ({**numbers(0, 1, 2), "pub_port": 65000, "port_offset": 1000}, ValueError, ["pub_port=65000 and port_offset="]),
    ],
)
def test_wrong_numbers_are_named_at_once(given: dict[str, Any], error: type[Exception], texts: list[str]) -> None:
    with pytest.raises(error) as caught:
        DistributedContext(**given)
    assert [text for text in texts if text not in str(caught.value)] == []


@pytest.mark.slow
def test_disagreeing_ranks_are_refused() -> None:
    port = free_port()

    def on_rank(rank: int) -> str:
        with pytest.raises(ValueError) as caught:
            meet(rank, port, 4, local_rank=0, local_size=2, cross_rank=rank // 2, cross_size=2)
        return str(caught.value)

    for message in in_threads(range(4), on_rank):
        assert "ranks 0 and 1 both have cross_rank=0, local_rank=0" in message
        assert "ranks 2 and 3 both have cross_rank=1, local_rank=0" in message


def test_port_offset_is_added() -> None:
    port = free_port()

    def on_rank(rank: int) -> Any:
        # Rank 1 names the same port differently.
        offset = 7 * rank
        with contextlib.closing(meet(rank, port - offset, port_offset=offset, pull_port=1, force_tcp=True)) as context:
            return context.allgather(rank)

    assert in_threads(range(2), on_rank) == [[0, 1], [0, 1]]


@pytest.mark.slow
def test_store_of_one_node_is_local() -> None:
    def do(context: DistributedContext) -> bool:
        assert context._session is not None
        port = context._session.address.port
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), port, socket.AF_INET)}
        reached = False
        for address in (one for one in addresses if not one.startswith("127.")):
            with contextlib.suppress(OSError):
                socket.create_connection((address, port), timeout=2).close()
                reached = True
        context.allgather(None)
        return reached

    assert on_ranks(1, 2, do) == [False, False]


@pytest.mark.slow
def test_topology_is_horovods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTER_TRAIN_PROCESS_COMM_PORT_1", str(free_port()))
    monkeypatch.setenv("DET_CHIEF_IP", "127.0.0.1")

    def on_rank(rank: int) -> Any:
        topology = numbers(rank, 2, 1)
        del topology["chief_ip"]
        hvd = SimpleNamespace(**{name: (lambda value=value: value) for name, value in topology.items()})
        with contextlib.closing(DistributedContext.from_horovod(hvd, timeout_s=TIMEOUT_S)) as context:
            return context.allgather(context.cross_rank)

    assert in_threads(range(2), on_rank) == [[0, 1], [0, 1]]


def test_topology_is_read_from_deepspeeds_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"]
    for name, value in zip(names, "010101", strict=True):
        monkeypatch.setenv(name, value)
    assert DistributedContext.from_deepspeed().size == 1
    monkeypatch.setenv("CROSS_SIZE", "two")
    monkeypatch.setenv("LOCAL_RANK", "")
    with pytest.raises(ValueError, match="LOCAL_RANK='', CROSS_SIZE='two' are not numbers"):
        DistributedContext.from_deepspeed()


def test_missing_launcher_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Determined raises a KeyError, which scripts catch."""
    monkeypatch.delenv("RANK", raising=False)
    torchrun = r"^from_torch_distributed\(\) needs torchrun; .*GROUP_WORLD_SIZE are not in the environment"
    deepspeed = r"^from_deepspeed\(\) needs the DeepSpeed launcher; under torchrun .*from_torch_.*CROSS_SIZE are not"
    with pytest.raises(ValueError, match=torchrun) as raised:
        DistributedContext.from_torch_distributed()
    assert isinstance(raised.value, KeyError)
    with pytest.raises(KeyError, match=deepspeed):
        DistributedContext.from_deepspeed()
    with pytest.raises(NotImplementedError, match="TensorFlow"):
        DistributedContext.from_tf_config()


# What goes wrong


@pytest.mark.slow
def test_unstarted_rank_is_named() -> None:
    port = free_port()

    def on_rank(rank: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            meet(rank, port, 4, timeout_s=2)
        return str(caught.value)

    chief, other = in_threads((0, 2), on_rank)
    assert "for ranks 1, 3 of 4, which did not come" in chief
    assert other == chief


@pytest.mark.slow
def test_a_chief_that_is_never_started_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"Rank 1 has not reached the store at 127.0.0.1.* Check that rank 0 runs"):
        meet(1, free_port(), timeout_s=1)


def test_a_port_that_is_in_use_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(RuntimeError, match=f"cannot run the store .* port {taken.getsockname()[1]}.*port_offset="),
    ):
        meet(0, taken.getsockname()[1], timeout_s=1)


@pytest.mark.slow
@pytest.mark.parametrize("leaver", [0, 1])
def test_early_close_ends_the_waiting(leaver: int) -> None:
    def do(context: DistributedContext) -> None:
        context.allgather(None)
        if context.rank != leaver:
            context.broadcast(None)

    found = errors(on_ranks(1, 3, do))
    assert found.keys() == {0, 1, 2} - {leaver}
    assert not any("has waited" in text for text in found.values())
    assert any(f"rank {leaver} takes part no more, since its context was closed" in text for text in found.values())


@pytest.mark.slow
def test_different_operations_are_named() -> None:
    def do(context: DistributedContext) -> None:
        getattr(context, "broadcast" if context.rank == 1 else "gather")(None)

    found = errors(on_ranks(1, 3, do))
    assert found.keys() == {0, 1, 2}
    for text in found.values():
        assert "rank 0 gather(), rank 1 broadcast(), rank 2 gather()" in text


@pytest.mark.slow
def test_after_closing_an_exchange_raises() -> None:
    def do(context: DistributedContext) -> None:
        context.allgather(None)
        context.close()
        context.close()
        context.gather_local(None)

    for text in errors(on_ranks(1, 2, do)).values():
        assert "no longer exchanges anything: its context was closed" in text


@pytest.mark.slow
def test_unpicklable_object_breaks_nothing() -> None:
    def do(context: DistributedContext) -> Any:
        with contextlib.suppress(Exception):
            context.allgather(lambda: None)
        return context.allgather(context.rank)

    assert on_ranks(1, 2, do) == [[0, 1], [0, 1]]


@pytest.mark.slow
def test_contexts_share_a_port() -> None:
    port = free_port()

    def on_rank(rank: int) -> list[Any]:
        found = []
        for number in range(3):
            one, two = (meet(rank, port, 3, timeout_s=30) for _ in range(2))
            with contextlib.closing(one), contextlib.closing(two):
                found.append((one.allgather((number, 1)), two.allgather((number, 2))))
        return found

    assert in_threads(range(3), on_rank) == [[([(number, 1)] * 3, [(number, 2)] * 3) for number in range(3)]] * 3


# Processes


def results_of(target: Callable[..., None], *arguments: Any) -> list[Any]:
    """Run a function in two processes; return what those put into a queue that end well."""
    results = multiprocessing.get_context("fork").Queue()
    processes = start_forked(2, target, free_port(), results, *arguments)
    ends_of(processes, 120)
    return [results.get(timeout=10) for process in processes if process.exitcode == 0]


@pytest.mark.slow
def test_processes_need_not_close() -> None:
    def exchange(rank: int, port: int, results: Any) -> None:
        context = meet(rank, port)
        results.put((rank, context.allgather({"rank": rank}), context.broadcast(rank)))
        # Neither closes: the chief has to go on serving until the other one has read the last object.

    everyone = [{"rank": 0}, {"rank": 1}]
    assert sorted(results_of(exchange)) == [(0, everyone, 0), (1, everyone, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("dying", [0, 1])
def test_a_process_that_is_killed_is_named(dying: int) -> None:
    def die(rank: int, port: int, results: Any, others_are_ready: Any) -> None:
        context = meet(rank, port)
        if rank == dying:
            others_are_ready.wait(TIMEOUT_S)
            os.kill(os.getpid(), signal.SIGKILL)
        session._LINGER_AFTER_FAILURE_S = 0.5
        assert context._session is not None
        context._session.timeout_s = 2.0
        others_are_ready.set()
        try:
            context.allgather(None)
        except RuntimeError as error:
            results.put(str(error))

    (text,) = results_of(die, multiprocessing.get_context("fork").Event())
    if dying == 0:
        assert "Rank 1 has lost the store" in text
        assert "rank 0 runs" in text
    else:
        assert "allgather() of rank 0 has waited 2 s for rank 1." in text


def torchrun(script: str, directory: Path, *options: str) -> list[str]:
    """Run a script on two ranks; return what each wrote."""
    path = directory / "script.py"
    path.write_text(textwrap.dedent(script))
    launcher = [start_warm_python().executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
    done = subprocess.run([*launcher, str(path)], cwd=directory, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return [(directory / f"out{rank}").read_text() for rank in range(2)]


@lists_keys
@pytest.mark.slow
def test_torchrun_agents_store_is_used(tmp_path: Path) -> None:
    found = torchrun(
        """
        import torch, torch.distributed as dist
        from pathlib import Path
        from det_lightning.core import DistributedContext

        context = DistributedContext.from_torch_distributed()
        before = context.allgather(context.rank)
        dist.init_process_group("gloo")
        tensor = torch.tensor([context.rank + 1])
        dist.all_reduce(tensor)
        after = context.broadcast_local({"from": context.rank})
        store = context._session._shared_store.underlying_store
        context.close()
        dist.barrier()
        left = [key for key in store.list_keys() if "det_lightning" in key]
        Path(f"out{context.rank}").write_text(repr((before, int(tensor), after, context.local_rank, left)))
        dist.destroy_process_group()
        """,
        tmp_path,
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
    )
    assert found == [repr(([0, 1], 3, {"from": 0}, rank, [])) for rank in range(2)]


@pytest.mark.slow
def test_restart_sees_no_old_keys(tmp_path: Path) -> None:
    found = torchrun(
        """
        import os
        from pathlib import Path
        from det_lightning.core import DistributedContext

        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        context = DistributedContext.from_torch_distributed(timeout_s=60)
        found = [context.allgather((attempt, context.rank))]
        if attempt == 0 and context.rank == 1:
            os._exit(3)
        found.append(context.allgather((attempt, context.rank, "again")))
        Path(f"out{context.rank}").write_text(repr(found))
        """,
        tmp_path,
        *("--max-restarts", "1", "--monitor-interval", "0.2", "--standalone"),
    )
    assert found == [repr([[(1, 0), (1, 1)], [(1, 0, "again"), (1, 1, "again")]])] * 2


@pytest.mark.slow
def test_failed_process_ends_the_waiting() -> None:
    script = """
from tests.ranks.ranks import meet
context = meet({rank}, {port}, chief_ip=None)
if {rank} == 1:
    raise ValueError("the culprit")
context.gather(None)
"""
    python, port = start_warm_python().executable, free_port()
    commands = [[python, "-c", script.format(rank=rank, port=port)] for rank in range(2)]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) for command in commands]
    chief, other = (run.communicate(timeout=120)[1] for run in runs)
    assert "the culprit" in other
    assert "rank 1 takes part no more, since its process has ended without close()" in chief


# Giving up on hyperparameters


def test_giving_up_is_told_to_others() -> None:
    def do(context: DistributedContext) -> str:
        if context.rank == 1:
            context.give_up(InvalidHP("caught"))
        context.allgather(None)
        context.abandon(ValueError("later"))
        return context.given_up

    assert on_ranks(1, 2, do) == ["rank 1 gave up on the hyperparameters (InvalidHP): caught", ""]


def test_ranks_go_on_after_giving_up() -> None:
    def do(context: DistributedContext) -> str:
        context.give_up(InvalidHP("caught"))
        context.allgather(None)
        assert context.meet(10.0, "the run ends")
        context.allgather(None)
        context.abandon(ValueError("later"))
        return context.given_up

    assert on_ranks(1, 2, do) == ["", ""]
