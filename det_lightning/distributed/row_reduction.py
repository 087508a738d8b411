"""Reductions over the ranks by tensor collectives, bit for bit equal to reducing the values gathered on one rank.

An all-reduce adds in its own order, which may change the last bit. So each rank gets the values of all ranks for its
share of the rows, reduces them in rank order, and sends the results to all: for ``n`` bytes each rank sends and
receives ``2 n`` in two rounds, however many ranks there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from det_lightning.distributed.group_collectives import Array, GroupCollectives

# The header before the rows: their signature, and flags.
_HEADER_ROWS = 2


@dataclasses.dataclass(frozen=True)
class Rows:
    """What one rank contributes to a reduction.

    Attributes:
        bits: int64 of shape ``(n, width)``, which may hold the bits of any numbers.
        signature: a nonzero int64, equal on two ranks if they have the same number of rows with the same meaning.
        reduce: returns the results of some rows, int64 of shape ``(k,)``, given the index of the first row and the bits
            of all ranks, of shape ``(ranks, k, width)``. If another rank has a different signature, the results are not
            used.
    """

    bits: Array
    signature: int
    reduce: Callable[[int, Array], Array]


@dataclasses.dataclass(frozen=True)
class Reduced:
    """The flags that any rank has set, and the result of each row, int64 of shape ``(n,)``.

    The results are None if a rank has no rows, or different ones from this rank.
    """

    flags: int
    results: Array | None


class RowReduction:
    """Reduces rows over the ranks, again and again; all ranks call it, with or without rows.

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
