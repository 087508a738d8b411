"""Collectives of numpy arrays over the process group, with the errors of exchanges of objects.

Reductions equal, bit for bit, a reduction of the gathered values on a single rank; the order of an all-reduce differs.
Each rank gets the values of all ranks for a share of the rows, reduces the rows in rank order, and sends the results to
all ranks: for ``n`` bytes each rank sends and receives ``2 n`` in two rounds, for any number of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from det_lightning.ranks.distributed_context import DistributedContext

Array = np.ndarray[Any, Any]

# Gloo's all-gather passes data around a ring; sending a copy to each rank takes one round, but more memory.
_LARGEST_COPIES_BYTES = 1 << 20
# Before the rows of a reduction: the signature, and flags.
_HEADER_ROWS = 2


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

    def all_to_all(self, outgoing: Array, operation: str) -> Array:
        """Send each rank a part of ``outgoing``, all of equal length; return the parts from all ranks."""
        sent = torch.from_numpy(outgoing).to(self._device)
        received = torch.empty_like(sent)
        self._distributed.wait_for(dist.all_to_all_single(received, sent, async_op=True), operation)
        return received.cpu().numpy()

    def all_gather(self, own: Array, operation: str) -> Array:
        """Return the vectors of all ranks as an array of shape ``(ranks, n)``."""
        if own.nbytes * self.size <= _LARGEST_COPIES_BYTES:
            return self.all_to_all(np.tile(own, self.size), operation).reshape(self.size, -1)
        sent = torch.from_numpy(own).to(self._device)
        received = torch.empty((self.size, len(own)), dtype=sent.dtype, device=self._device)
        self._distributed.wait_for(dist.all_gather(list(received.unbind()), sent, async_op=True), operation)
        return received.cpu().numpy()

    def broadcast(self, own: Array, operation: str) -> Array:
        exchanged = torch.from_numpy(own).to(self._device)
        self._distributed.wait_for(dist.broadcast(exchanged, 0, async_op=True), operation)
        return exchanged.cpu().numpy()


@dataclasses.dataclass(frozen=True)
class Rows:
    """The contribution of a rank to a reduction.

    Attributes:
        bits: int64 of shape ``(n, width)``, with the bits of any numbers.
        signature: a nonzero int64, equal on two ranks with the same number of rows and the same meaning.
        reduce: returns the results of some rows, int64 of shape ``(k,)``, given the index of the first row and the bits
            of all ranks, of shape ``(ranks, k, width)``. Not used if signatures differ.
    """

    bits: Array
    signature: int
    reduce: Callable[[int, Array], Array]


@dataclasses.dataclass(frozen=True)
class Reduced:
    """The flags of all ranks, and the result of each row, int64 of shape ``(n,)``.

    The results are None if a rank has no rows, or different rows.
    """

    flags: int
    results: Array | None


class RowReduction:
    """Reduces rows over the ranks, again and again; all ranks take part, with or without rows.

    Each call takes two collectives, or four if there are more rows than in any call before. All ranks send the same
    number of rows, so shorter lists are padded to the longest so far.
    """

    def __init__(self, collectives: GroupCollectives, width: int, operation: str) -> None:
        self._collectives = collectives
        self._width = width
        self._operation = operation
        self._capacity = 0

    def reduce(self, rows: Rows | None, flags: int) -> Reduced:
        """Return on every rank the same flags and, if all ranks have rows with the same meaning, the same results."""
        found = self._exchange(rows, flags)
        signature, all_flags = (int(number) for number in found[:_HEADER_ROWS])
        if rows is None or not signature:
            return Reduced(all_flags, None)
        if len(rows.bits) > self._capacity:  # on all ranks, as their signatures are the same
            self._capacity = len(rows.bits)
            found = self._exchange(rows, flags)
        return Reduced(all_flags, found[_HEADER_ROWS : _HEADER_ROWS + len(rows.bits)])

    def _exchange(self, rows: Rows | None, flags: int) -> Array:
        """Return the results of the header and of the rows that fit."""
        ranks = self._collectives.size
        share = -(-(_HEADER_ROWS + self._capacity) // ranks)
        outgoing = np.zeros((ranks * share, self._width), np.int64)
        outgoing[1, 0] = flags
        fitting = None
        if rows is not None:
            outgoing[0, 0] = rows.signature
            if len(rows.bits) <= self._capacity:
                fitting = rows
                outgoing[_HEADER_ROWS : _HEADER_ROWS + len(rows.bits)] = rows.bits
        of_ranks = self._collectives.all_to_all(outgoing.reshape(-1), self._operation)
        results = _reduce_share(of_ranks.reshape(ranks, share, self._width), self._collectives.rank * share, fitting)
        return self._collectives.all_to_all(np.tile(results, ranks), self._operation)


def _reduce_share(bits: Array, first: int, rows: Rows | None) -> Array:
    """Reduce the header and the rows from index ``first`` on, given the bits of all ranks."""
    share = bits.shape[1]
    results = np.zeros(share, np.int64)
    for index in range(first, min(first + share, _HEADER_ROWS)):
        numbers = bits[:, index - first, 0]
        if index:
            results[index - first] = np.bitwise_or.reduce(numbers)
        elif (numbers == numbers[0]).all():
            results[0] = numbers[0]
    begin = max(_HEADER_ROWS - first, 0)
    end = begin if rows is None else min(share, _HEADER_ROWS + len(rows.bits) - first)
    if rows is not None and begin < end:
        results[begin:end] = rows.reduce(first + begin - _HEADER_ROWS, bits[:, begin:end])
    return results
