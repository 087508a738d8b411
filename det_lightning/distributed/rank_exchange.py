"""Exchanges among ranks at the boundaries of a run, by tensor collectives if there is a process group.

A report or a validation takes two exchanges of tensors for metrics and requests to stop. Values of a user's reducers
travel as pickles. At a checkpoint the chief gathers random states, positions and gradients of an aggregation.
"""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from det_lightning.distributed.group_collectives import (
    Array,
    GroupCollectives,
    Reduced,
    RowReduction,
    Rows,
    find_group_device,
)
from det_lightning.ranks.distributed_context import DistributedContext

_LENGTH_BYTES = 8


class RankExchange:
    """Exchanges among the ranks of a run; all ranks must call the same methods in the same order.

    The first exchange finds out whether all ranks have a process group. Without a group, objects go through the store
    of ``distributed``.
    """

    def __init__(self, distributed: DistributedContext) -> None:
        self.distributed = distributed
        self.is_alone = distributed.size == 1
        self._reductions: dict[str, RowReduction] = {}
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

    def reduce(self, rows: Rows | None, flags: int, width: int, operation: str) -> Reduced:
        """Return the flags of all ranks, and the results of the rows if all ranks have some and a process group.

        Args:
            rows: the contribution of this rank, each row with ``width`` numbers; None for nothing.
            flags: bits; the union over all ranks is returned.
            width: the same in all calls with this operation.
            operation: a name for messages.
        """
        group = self._group()
        if group is None:
            return Reduced(functools.reduce(operator.or_, self.distributed.allgather(flags)), None)
        if operation not in self._reductions:
            self._reductions[operation] = RowReduction(group, width, operation)
        return self._reductions[operation].reduce(rows, flags)

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
        (frame,) = self._exchange_whole(pickled, lambda frame: [group.broadcast(frame, "broadcast")])
        return stuff if self.distributed.rank == 0 else pickle.loads(_read_content(frame))

    def _exchange_whole(self, pickled: bytes, exchange: Callable[[Array], list[Array]]) -> list[Array]:
        """Exchange frames with room for the longest pickle: a second time, if the first had not enough."""
        frames = exchange(self._frame(pickled))
        longest = max(map(_read_length, frames))
        if longest > self._object_bytes:
            self._object_bytes = longest
            frames = exchange(self._frame(pickled))
        # Leaves room for a slightly longer one next time.
        self._object_bytes = max(1024, longest + longest // 4)
        return frames

    def _frame(self, pickled: bytes) -> Array:
        """Return a vector, of the same size on all ranks, with the pickle's length and, if small enough, the pickle."""
        frame = np.zeros(_LENGTH_BYTES + self._object_bytes, np.uint8)
        frame[:_LENGTH_BYTES] = np.array([len(pickled)], np.int64).view(np.uint8)
        if len(pickled) <= self._object_bytes:
            frame[_LENGTH_BYTES : _LENGTH_BYTES + len(pickled)] = np.frombuffer(pickled, np.uint8)
        return frame


def _read_length(frame: Array) -> int:
    return int(frame[:_LENGTH_BYTES].view(np.int64)[0])


def _read_content(frame: Array) -> bytes:
    return bytes(frame[_LENGTH_BYTES : _LENGTH_BYTES + _read_length(frame)].data)
