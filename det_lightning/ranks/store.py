"""The key-value store of a run, from torch: address, server and connections."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Protocol, cast

from torch.distributed import DistNetworkError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from det_lightning.ranks.topology import ProcessTopology

_PORT_VARIABLE = "INTER_TRAIN_PROCESS_COMM_PORT_1"
_DEFAULT_PORT = 12360
_SHORTEST_PAUSE_S = 0.00005
LONGEST_PAUSE_S = 0.05
_REQUEST_TIMEOUT = timedelta(seconds=30)


class Store(Protocol):
    """The part of ``torch.distributed.Store`` in use, typed with bytes as values, which torch's annotations lack."""

    def set(self, key: str, value: bytes) -> None: ...
    def append(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, value: int) -> int: ...
    def compare_set(self, key: str, expected: str, value: bytes) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


@dataclasses.dataclass(frozen=True)
class StoreAddress:
    """The address of the store; ``one_node`` if no other nodes need to connect.

    Rank 0 runs the store if ``of_chief`` is true, otherwise the agent of ``torchrun`` does.
    """

    host: str
    port: int
    of_chief: bool
    one_node: bool

    def __str__(self) -> str:
        return f"{self.host}:{self.port}, which {'rank 0' if self.of_chief else 'the agent of torchrun'} runs"


def find_store(topology: ProcessTopology, chief_ip: str | None, port: int | None, port_offset: int) -> StoreAddress:
    """Return the address of the store on ``torchrun``'s agent, or else on rank 0.

    Raises:
        ValueError: the sum of the port and its offset is not a port.
    """
    one_node = topology.cross_size == 1
    # The store of torchrun's agent, if the agent started this process as this rank.
    started_as = (os.environ.get("RANK"), os.environ.get("WORLD_SIZE"))
    agent = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if has_store and started_as == (str(topology.rank), str(topology.size)) and agent[0] and agent[1]:
        return StoreAddress(agent[0], int(agent[1]), of_chief=False, one_node=one_node)
    if port is None:
        port = int(os.environ.get(_PORT_VARIABLE, _DEFAULT_PORT))
    if not 0 < port + port_offset < 2**16:
        raise ValueError(f"pub_port={port} and port_offset={port_offset}: their sum must be from 1 to {2**16 - 1}.")
    host = "127.0.0.1" if one_node or topology.rank == 0 or chief_ip is None else chief_ip
    return StoreAddress(host, port + port_offset, of_chief=True, one_node=one_node)


def pauses(timeout_s: float, longest_s: float = LONGEST_PAUSE_S) -> Iterator[float]:
    """Yield the seconds passed, sleeping after each, until the time is up.

    Ranks poll the store, because signals do not interrupt the store's own ``wait``, and a timeout logs warnings. A wait
    is at most an eighth longer than needed, and at most ``longest_s`` longer, which costs 20 requests of 0.1 ms a
    second.
    """
    started = time.monotonic()
    while (passed := time.monotonic() - started) < timeout_s:
        yield passed
        time.sleep(min(max(passed / 8, _SHORTEST_PAUSE_S), longest_s))


def look(store: Store, key: str) -> bytes | None:
    """Return the value of a key, or None if there is none, in one request; ``check`` and ``get`` would make three."""
    # Since the expected value is not empty, a missing key is not created, and the expected value is returned.
    found = store.compare_set(key, "?", b"?")
    return None if found == b"?" else found


def within(store: Store, prefix: str) -> Store:
    """Return the part of a store under ``prefix`` as a store."""
    return cast(Store, PrefixStore(prefix, cast(TCPStore, store)))


def serve(address: StoreAddress) -> Store:
    """Start the store in this process, or reuse a running store at the same port."""
    listening = None
    if address.one_node:  # not reachable for other machines; torch reuses or refuses a port in use
        with contextlib.suppress(OSError):
            listening = socket.create_server(("127.0.0.1", address.port)).detach()
    try:
        store = TCPStore(
            "127.0.0.1",
            address.port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening,
            use_libuv=False,  # libuv's store in torch 2.6 cannot take over a socket
            timeout=_REQUEST_TIMEOUT,
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank 0 cannot run the store of its DistributedContext at port {address.port}: "
            f"{str(error).splitlines()[0]} If another run on this machine uses the port, set pub_port= or "
            "port_offset= of DistributedContext, or INTER_TRAIN_PROCESS_COMM_PORT_1 in the environment of all ranks."
        ) from error
    return cast(Store, store)


def reach(address: StoreAddress, rank: int, timeout_s: float) -> Store:
    """Connect to the store of the chief or the agent; raise a RuntimeError after ``timeout_s``."""
    problem: Exception | None = None
    for _ in pauses(timeout_s):
        try:
            # torch itself would log every refusal until the chief has started.
            socket.create_connection((address.host, address.port), timeout=10).close()
            return cast(Store, TCPStore(address.host, address.port, is_master=False, timeout=_REQUEST_TIMEOUT))
        except (OSError, DistNetworkError) as error:
            problem = error
    raise RuntimeError(
        f"Rank {rank} has not reached the store at {address} within {timeout_s:g} s: {problem}. Check that rank 0 "
        "runs, and that this node can reach the port."
    )
