"""The contributions of ranks to a round of an exchange, and the form of all contributions in the store."""

from __future__ import annotations

import io
import itertools
import pickle
from typing import NamedTuple


class Contribution(NamedTuple):
    """The contribution of a rank to a round: the name of the operation, and a pickle, inline or in parts."""

    member: int
    operation: str
    parts: int
    inline: bytes


def read_contributions(appended: bytes) -> list[Contribution]:
    """Return the contributions appended to a key, in the order of the group."""
    stream = io.BytesIO(appended)
    found = []
    while stream.tell() < len(appended):
        found.append(Contribution(*pickle.load(stream)))
    return sorted(found)


def condense(contributions: list[Contribution]) -> bytes:
    """Return contributions, in the order of the group, as a pickle with equal neighbours only once."""
    # Contributions in parts are stored under keys of their own.
    groups = itertools.groupby(contributions, lambda one: one if one.parts else one[1:])
    runs = [[*members] for _, members in groups]
    return pickle.dumps([(tuple(members[0]), len(members)) for members in runs], pickle.HIGHEST_PROTOCOL)


def expand(condensed: bytes) -> list[Contribution]:
    """Return the contributions in a pickle of :func:`condense`."""
    runs = pickle.loads(condensed)
    return [Contribution(member + offset, *rest) for (member, *rest), count in runs for offset in range(count)]
