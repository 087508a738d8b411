"""Decides whether torchrun or Horovod connects the processes of a run; exchanges objects at boundaries."""

from __future__ import annotations

import functools
import operator
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from det_lightning.distributed.backend import choose_device
from det_lightning.escaping import get_logger
from det_lightning.missing_parts import how_to_build_horovod
from det_lightning.ranks.distributed_context import DistributedContext
from det_lightning.ranks.topology import free_port, topology_from_horovod

logger = get_logger(__name__)

_WANTED = "USE_HOROVOD"
_OF_HOROVODRUN = "HOROVOD_RANK"
_OF_OTHERS = ("USE_TORCH_DISTRIBUTED", "USE_DEEPSPEED", "TORCHELASTIC_RUN_ID")
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_LAUNCHERS = (_OF_HOROVODRUN, "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def horovod_is_wanted() -> bool:
    """Return whether the environment asks for Horovod: ``USE_HOROVOD`` is set, or ``horovodrun`` started the process.

    After ``torch.distributed`` was connected, a process of ``horovodrun`` does not count.
    """
    return bool(os.environ.get(_WANTED)) or (_OF_HOROVODRUN in os.environ and not dist.is_initialized())


def connect_horovod() -> Any:
    """Return ``horovod.torch``, connected to the other processes of the run.

    Raise an ImportError if Horovod is not installed or lacks torch, a ValueError if the environment asks for something
    else.
    """
    others = [f"{name}={os.environ[name]}" for name in _OF_OTHERS if os.environ.get(name)]
    if others:
        raise ValueError(
            f"This run trains with Horovod, but {', '.join(others)} in the environment asks for another launcher. "
            "Start the script either with horovodrun or det_lightning.launch.horovod, or with torchrun or "
            "det_lightning.launch.torch_distributed and without USE_HOROVOD."
        )
    try:
        import horovod.torch as hvd
    except ImportError as e:
        raise ImportError(
            f"This run trains with Horovod, which cannot be imported ({e}). {how_to_build_horovod()}"
        ) from e
    if not hvd.is_initialized():
        hvd.init()
        if hvd.size() == 1 and not any(name in os.environ for name in _OF_LAUNCHERS):
            logger.warning(
                "Horovod knows of one process only, so this process trains alone. For several processes, start the "
                "script with 'horovodrun -np N python SCRIPT' or 'python -m det_lightning.launch.horovod'."
            )
    return hvd


def refuse_horovod(strategy: str) -> None:
    """Raise a ValueError if the environment asks for Horovod although another strategy was chosen."""
    if horovod_is_wanted():
        raise ValueError(
            f"The strategy is {strategy!r}, and the environment asks for Horovod "
            f"({_WANTED if os.environ.get(_WANTED) else _OF_HOROVODRUN} is set). Choose strategy='horovod', or start "
            "the script without USE_HOROVOD and horovodrun."
        )


def connect_horovod_ranks() -> DistributedContext:
    """Return the context of Horovod's processes; all processes must call this."""
    hvd = connect_horovod()
    topology = topology_from_horovod(hvd)
    if topology.size == 1:
        return DistributedContext()
    port = hvd.broadcast_object(free_port(), 0, name="det_lightning.port")
    # The address of the first node, where horovodrun was started.
    chief_ip = os.environ.get("DET_CHIEF_IP") or os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    return DistributedContext(**vars(topology), chief_ip=chief_ip, pub_port=port)


def is_one_of_several() -> bool:
    """Return whether torchrun, or a launcher based on torchrun, started several processes."""
    return all(name in os.environ for name in _OF_TORCHRUN) and os.environ["WORLD_SIZE"] != "1"


def connect_torchrun_ranks() -> DistributedContext:
    """Return the context of torchrun's processes, connected by ``torch.distributed``; all processes must call this.

    A process group of the script is used. A new process group stays for the next ``init()``.
    """
    if not dist.is_initialized():
        on_gpu = select_device(int(os.environ["LOCAL_RANK"])).type == "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return DistributedContext.from_torch_distributed()


def select_device(local_rank: int) -> torch.device:
    """Return the device of a process, and select the device in torch; raise a ValueError if there are too few GPUs."""
    device = choose_device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


_Array = np.ndarray[Any, Any]

_LENGTH_BYTES = 8
# Gloo's all-gather passes data around a ring; sending a copy to each rank takes one round, but more memory.
_LARGEST_COPIES_BYTES = 1 << 20


def find_group_device(distributed: DistributedContext) -> torch.device | None:
    """Return the device of the process group's tensors; None if these ranks have no usable group."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if (dist.get_rank(), dist.get_world_size()) != (distributed.rank, distributed.size):
        return None
    backend = dist.get_backend()
    if "gloo" in backend:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None


class GroupCollectives:
    """Collectives of a process group, in the same order on all ranks, with arrays of equal size and type.

    ``device`` comes from :func:`find_group_device`.
    """

    def __init__(self, distributed: DistributedContext, device: torch.device) -> None:
        self.rank = distributed.rank
        self.size = distributed.size
        self._distributed = distributed
        self._device = device

    def all_to_all(self, outgoing: _Array, operation: str) -> _Array:
        """Send each rank a part of ``outgoing``, all of equal length; return the parts from all ranks."""
        sent = torch.from_numpy(outgoing).to(self._device)
        received = torch.empty_like(sent)
        self._distributed.wait_for(dist.all_to_all_single(received, sent, async_op=True), operation)
        return received.cpu().numpy()

    def all_gather(self, own: _Array, operation: str) -> _Array:
        """Return the vectors of all ranks as an array of shape ``(ranks, n)``."""
        if own.nbytes * self.size <= _LARGEST_COPIES_BYTES:
            return self.all_to_all(np.tile(own, self.size), operation).reshape(self.size, -1)
        sent = torch.from_numpy(own).to(self._device)
        received = torch.empty((self.size, len(own)), dtype=sent.dtype, device=self._device)
        self._distributed.wait_for(dist.all_gather(list(received.unbind()), sent, async_op=True), operation)
        return received.cpu().numpy()

    def send_from_chief(self, own: _Array, operation: str) -> _Array:
        exchanged = torch.from_numpy(own).to(self._device)
        self._distributed.wait_for(dist.broadcast(exchanged, 0, async_op=True), operation)
        return exchanged.cpu().numpy()


class RankExchange:
    """Exchanges among the ranks of a run; all ranks must call the same methods in the same order.

    The first exchange finds out whether all ranks have a process group. Without a group, objects go through the store
    of ``distributed``.
    """

    def __init__(self, distributed: DistributedContext) -> None:
        self.distributed = distributed
        self.is_alone = distributed.size == 1
        self._asked = self.is_alone
        self._found_group: GroupCollectives | None = None
        # From the previous exchange: an exchange of about as many bytes takes a single collective.
        self._object_bytes = 1024

    def _group(self) -> GroupCollectives | None:
        """Return the collectives of the process group, if all ranks have a group; the first call asks all ranks."""
        # Not a cached property: the lock in older Pythons would let ranks in threads in only one after another.
        if not self._asked:
            device = find_group_device(self.distributed)
            if all(self.distributed.allgather(device is not None)) and device is not None:
                self._found_group = GroupCollectives(self.distributed, device)
            self._asked = True
        return self._found_group

    def unite(self, flags: int) -> int:
        """Return the bits that any rank has set."""
        united: int = functools.reduce(operator.or_, self.allgather(flags))
        return united

    def allgather(self, stuff: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order: copies, except the chief's own object on the chief."""
        group = self._group()
        if group is None:
            return self.distributed.allgather(stuff)
        pickled = pickle.dumps(stuff, pickle.HIGHEST_PROTOCOL)
        frames = self._exchange_whole(pickled, lambda frame: [*group.all_gather(frame, "allgather")])
        own = [stuff] if self.distributed.rank == 0 else []
        return [*own, *(pickle.loads(_read_content(frame)) for frame in frames[len(own) :])]

    def broadcast(self, stuff: Any) -> Any:
        """Return the chief's object."""
        group = self._group()
        if group is None:
            return self.distributed.broadcast(stuff)
        pickled = pickle.dumps(stuff, pickle.HIGHEST_PROTOCOL) if self.distributed.rank == 0 else b""
        (frame,) = self._exchange_whole(pickled, lambda frame: [group.send_from_chief(frame, "broadcast")])
        return stuff if self.distributed.rank == 0 else pickle.loads(_read_content(frame))

    def _exchange_whole(self, pickled: bytes, exchange: Callable[[_Array], list[_Array]]) -> list[_Array]:
        """Exchange frames again, with room for the longest pickle, if the first frames were too small."""
        frames = exchange(self._frame(pickled))
        longest = max(map(_read_length, frames))
        if longest > self._object_bytes:
            self._object_bytes = longest
            frames = exchange(self._frame(pickled))
        # Leaves room for a slightly longer one next time.
        self._object_bytes = max(1024, longest + longest // 4)
        return frames

    def _frame(self, pickled: bytes) -> _Array:
        """Return a vector of a size common to all ranks, with the pickle's length and, if it fits, the pickle."""
        frame = np.zeros(_LENGTH_BYTES + self._object_bytes, np.uint8)
        frame[:_LENGTH_BYTES] = np.array([len(pickled)], np.int64).view(np.uint8)
        if len(pickled) <= self._object_bytes:
            frame[_LENGTH_BYTES : _LENGTH_BYTES + len(pickled)] = np.frombuffer(pickled, np.uint8)
        return frame


def _read_length(frame: _Array) -> int:
    return int(frame[:_LENGTH_BYTES].view(np.int64)[0])


def _read_content(frame: _Array) -> bytes:
    return bytes(frame[_LENGTH_BYTES : _LENGTH_BYTES + _read_length(frame)].data)
