"""What ranks contribute to a round of an exchange, and how the store holds the contributions of all."""

from __future__ import annotations

import io
import itertools
import pickle
from typing import NamedTuple


class Contribution(NamedTuple):
    """What one rank contributes to a round: the operation that it calls, and its pickle, inline or in parts."""

    member: int
    operation: str
    parts: int
    inline: bytes


def read_contributions(appended: bytes) -> list[Contribution]:
    """Read the contributions appended to one key; return them in the order of the group."""
    stream = io.BytesIO(appended)
    found = []
    while stream.tell() < len(appended):
        found.append(Contribution(*pickle.load(stream)))
    return sorted(found)


def condense(contributions: list[Contribution]) -> bytes:
    """Return contributions, in the order of the group, as a pickle that holds equal neighbours only once."""
    # Contributions in parts are stored under keys of their own.
    groups = itertools.groupby(contributions, lambda one: one if one.parts else one[1:])
    runs = [[*members] for _, members in groups]
    return pickle.dumps([(tuple(members[0]), len(members)) for members in runs], pickle.HIGHEST_PROTOCOL)


def expand(condensed: bytes) -> list[Contribution]:
    """Return the contributions in a pickle that :func:`condense` made."""
    runs = pickle.loads(condensed)
    return [Contribution(member + offset, *rest) for (member, *rest), count in runs for offset in range(count)]
