"""The nodes of a Ray cluster: connecting, listing, and the check that they share files."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from det_lightning import __version__, errors
from det_lightning.experiments.placement import Node
from det_lightning.files.local_files import NO_LOCKS, warn_of_no_locks

# A node may have to start a process and import this package first.
_ANSWER_S = 120.0
_CONNECT_S = 10.0
_NO_LOCKS = "sees no locks of other nodes on files there"


@contextlib.contextmanager
def connect(address: str) -> Iterator[None]:
    """Connect to a Ray cluster while the block runs; raise an ExperimentError without a cluster.

    The address is ``HOST:PORT``, ``auto`` for this machine's cluster, or ``local`` to start a cluster for the block.
    """
    _check_address(address)
    options: dict[str, Any] = {}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options["include_dashboard"] = False
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray raises nothing more specific if a node does not start in time
        raise errors.ExperimentError(
            f"--ray {address} cannot be used: {error} Start a cluster with `ray start --head`, or use --ray local."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Check that something answers at an address; Ray itself would wait for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        # A ray:// server keeps running for half a minute after its client was killed.
        raise errors.ExperimentError(
            f"--ray {address} cannot be used: expected HOST:PORT of a cluster, auto or local. Run det-lightning on a "
            "node of the cluster."
        )
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise errors.ExperimentError(
            f"--ray {address} cannot be used: nothing answers there ({error}). Start a cluster with "
            "`ray start --head`, or use --ray local."
        ) from error


def list_nodes() -> list[Node]:
    """Return the living nodes of the connected cluster, by name; Ray lists them in any order."""
    return sorted((Node.from_ray(node) for node in ray.nodes() if node["Alive"]), key=lambda node: node.name)


def check_shared(folder: Path, nodes: list[Node]) -> None:
    """Check that the nodes see the same files in a folder as this process; warn if they do not see its locks.

    A node that dies meanwhile, or has died unnoticed, is passed over.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".det-lightning-") as file:
        content = os.urandom(16)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        answers = [(node.name, _ask(node, file.name, content)) for node in nodes]
        problems = [(name, _answer(answer)) for name, answer in answers]
    if any(problem == _NO_LOCKS for _, problem in problems):
        warn_of_no_locks(str(folder), "trials of a lost node may start again while their processes still save")
    found = "; ".join(f"{name}: {problem}" for name, problem in problems if problem and problem != _NO_LOCKS)
    if found:
        raise errors.ExperimentError(
            f"Not all nodes of the Ray cluster can run trials of an experiment in {folder} ({found}). The nodes need "
            "this version of det_lightning, and a shared file system with the experiment, which --experiments names."
        )


def _ask(node: Node, path: str, content: bytes) -> Any:
    only_there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=only_there)(find_problem)
    return remote.remote(path, content, __version__)


def _answer(reference: Any) -> str | None:
    try:
        problem: str | None = ray.get(reference, timeout=_ANSWER_S)
    except (ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError):
        return None  # Ray lists a dead node for some 15 s more; no trial gets a place there
    except ray.exceptions.RayError as error:
        return str(error).strip().splitlines()[-1]
    return problem


def find_problem(path: str, content: bytes, version: str) -> str | None:
    """Return why this node cannot run trials, or None; ``path`` is a file that the runner has locked."""
    if __version__ != version:
        return f"has det_lightning {__version__}, not {version}"
    try:
        with Path(path).open("r+b") as file:
            if file.read() != content:
                return "sees another file of that name"
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        return _NO_LOCKS if error.errno in NO_LOCKS else f"cannot use files there: {error.strerror}"
    return _NO_LOCKS
