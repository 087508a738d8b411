"""Reductions over the ranks by tensor collectives, equal to the bit with those of values that one rank has gathered.

An all-reduce adds in an order of its own, which changes the last bit. So each rank gets the values of all ranks for its
share of the rows, reduces them in the order of the ranks, and sends the results to all: of ``n`` bytes each rank sends
and receives ``2 n`` in two rounds, however many ranks there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from det_lightning.distributed.group_collectives import Array, GroupCollectives

# What comes before the rows: their signature, and flags.
_HEADER_ROWS = 2


@dataclasses.dataclass(frozen=True)
class Rows:
    """What one rank contributes to a reduction.

    Attributes:
        bits: int64, shape ``(n, width)``, in which any numbers may be kept.
        signature: a nonzero int64, equal on two ranks if they have equally many rows that mean the same.
        reduce: returns the results of some rows, int64 of shape ``(k,)``, from the index of the first one and the bits
            of all ranks, of shape ``(ranks, k, width)``. The other ranks have the same signature, or what it returns is
            not used.
    """

    bits: Array
    signature: int
    reduce: Callable[[int, Array], Array]


@dataclasses.dataclass(frozen=True)
class Reduced:
    """The flags that any rank has set; and the result of each row, int64 of shape ``(n,)``.

    The latter are None if a rank has no rows, or others than this one.
    """

    flags: int
    results: Array | None


class RowReduction:
    """Reduces rows over the ranks, again and again; all ranks call it, with rows or without.

    Each call takes two collectives; four, if there are more rows than in any call before. All ranks send equally many
    rows, so shorter lists are padded to the longest so far.
    """

    def __init__(self, collectives: GroupCollectives, width: int, operation: str) -> None:
        self._collectives = collectives
        self._width = width
        self._operation = operation
        self._capacity = 0

    def reduce(self, rows: Rows | None, flags: int) -> Reduced:
        """Return on every rank the same flags and, if all ranks have rows that mean the same, the same results."""
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
    """Reduce the header and the rows from index ``first`` on, of which the bits of all ranks are given."""
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
