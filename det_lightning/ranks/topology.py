"""Process topology: a process's rank and node, whether the numbers are consistent, and finding a free port."""

from __future__ import annotations

import dataclasses
import os
import socket
from numbers import Integral
from typing import Any, ClassVar

from det_lightning.arguments import require

# The variables of the launchers, in the order of the fields of ProcessTopology.
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
DEEPSPEED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


class _DistributedBackend:
    """The launcher that started this process, by the variables that are not empty; ``det._DistributedBackend``.

    The constants are the names of the variables.
    """

    HOROVOD: ClassVar[str] = "USE_HOROVOD"
    DEEPSPEED: ClassVar[str] = "USE_DEEPSPEED"
    TORCH: ClassVar[str] = "USE_TORCH_DISTRIBUTED"

    def use_horovod(self) -> bool:
        return bool(os.environ.get(self.HOROVOD))

    def use_deepspeed(self) -> bool:
        return bool(os.environ.get(self.DEEPSPEED))

    def use_torch(self) -> bool:
        return bool(os.environ.get(self.TORCH))


class NotLaunched(ValueError, KeyError):
    """Raised if variables of a launcher are missing; also a KeyError, because scripts catch Determined's."""

    def __str__(self) -> str:
        # KeyError would quote the text like a key.
        return ValueError.__str__(self)


@dataclasses.dataclass(frozen=True)
class ProcessTopology:
    """The position of a process in a run; the defaults are those of a single process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1


def validate_topology(numbers: tuple[int | None, ...], timeout_s: float) -> ProcessTopology:
    """Return the topology with these numbers, in the order of the fields; if all are None, that of a single process.

    An error names all mistakes.
    """
    names = [field.name for field in dataclasses.fields(ProcessTopology)]
    given = {name: number for name, number in zip(names, numbers, strict=True) if number is not None}
    if 0 < len(given) < len(names):
        missing = ", ".join(name for name in names if name not in given)
        raise ValueError(
            "DistributedContext needs rank, size, local_rank, local_size, cross_rank and cross_size, or none of them; "
            f"got only {', '.join(f'{name}={value}' for name, value in given.items())}, without {missing}."
        )
    for name, number in given.items():
        require(isinstance(number, Integral), f"DistributedContext({name}=...)", "a whole number", number)
    topology = ProcessTopology(**given)
    values = vars(topology)
    problems = [
        f"{index}={values[index]}, {count}={values[count]}: {index} must be from 0 to {count} - 1"
        for index, count in (("rank", "size"), ("local_rank", "local_size"), ("cross_rank", "cross_size"))
        if not 0 <= values[index] < values[count]
    ]
    # Nodes may have different numbers of processes, but each has at least one.
    others = topology.size - topology.local_size
    if others < topology.cross_size - 1 or (topology.cross_size == 1 and others):
        problems.append(
            f"size={topology.size} processes cannot be local_size={topology.local_size} on this node and some on each "
            f"of the others of cross_size={topology.cross_size} nodes"
        )
    if not timeout_s > 0:
        problems.append(f"timeout_s={timeout_s!r} must be above 0")
    if problems:
        raise ValueError(f"DistributedContext cannot be made: {'; '.join(problems)}.")
    return topology


def find_contradictions(ranks: list[ProcessTopology]) -> list[str]:
    """Return the contradictions between the topologies of the ranks, each consistent alone."""
    chief = ranks[0]
    problems = []
    slots: dict[tuple[int, int], int] = {}
    first_on_node: dict[int, ProcessTopology] = {}
    for topology in ranks:
        neighbour = first_on_node.setdefault(topology.cross_rank, topology)
        for name, other in (("size", chief), ("local_size", neighbour), ("cross_size", chief)):
            if (own := getattr(topology, name)) != (others := getattr(other, name)):
                problems.append(f"rank {topology.rank} has {name}={own}, rank {other.rank} has {name}={others}")
        holder = slots.setdefault((topology.cross_rank, topology.local_rank), topology.rank)
        if holder != topology.rank:
            slot = f"cross_rank={topology.cross_rank}, local_rank={topology.local_rank}"
            problems.append(f"ranks {holder} and {topology.rank} both have {slot}")
    return problems


def find_members(ranks: list[ProcessTopology], node: int) -> list[int]:
    """Return the ranks on a node, ordered by local rank."""
    members = [topology for topology in ranks if topology.cross_rank == node]
    return [topology.rank for topology in sorted(members, key=lambda topology: topology.local_rank)]


def find_chief_ip(given: str | None, other_variable: str = "") -> str | None:
    """Return the given address of the chief, or the address in the environment, or None."""
    return given or os.environ.get("DET_CHIEF_IP") or os.environ.get(other_variable) or None


def topology_from_environment(need: str, variables: tuple[str, ...]) -> ProcessTopology:
    """Read the numbers from variables, in the order of the fields; an error begins with ``need``."""
    missing = [name for name in variables if name not in os.environ]
    if missing:
        raise NotLaunched(f"{need}; {', '.join(missing)} are not in the environment.")
    texts = {name: os.environ[name] for name in variables}
    wrong = [f"{name}={text!r}" for name, text in texts.items() if not text.strip().lstrip("-").isdecimal()]
    if wrong:
        raise ValueError(f"{need}; in the environment {', '.join(wrong)} are not numbers.")
    return ProcessTopology(*map(int, texts.values()))


def topology_from_horovod(hvd: Any) -> ProcessTopology:
    """Return the topology of the processes of ``horovod.torch``."""
    return ProcessTopology(**{field.name: getattr(hvd, field.name)() for field in dataclasses.fields(ProcessTopology)})


def free_port(host: str = "") -> int:
    """Return an unused TCP port, on an interface or by default on any."""
    with socket.socket() as found:
        found.bind((host, 0))
        port: int = found.getsockname()[1]
    return port
