"""What each rank contributes to an exchange of objects, and how it is encoded in the store."""

from __future__ import annotations

import dataclasses
import io
import itertools
import pickle


@dataclasses.dataclass(frozen=True)
class Contribution:
    """The part of one rank in a round: the operation that it calls, and its pickle, inline or in parts."""

    index: int
    operation: str
    parts: int
    inline: bytes

    def pickled(self) -> bytes:
        """Return what :func:`read_contributions` reads."""
        return pickle.dumps(dataclasses.astuple(self))


def read_contributions(appended: bytes) -> list[Contribution]:
    """Read the contributions appended to one key; return them in the order of the group."""
    stream = io.BytesIO(appended)
    found = []
    while stream.tell() < len(appended):
        found.append(Contribution(*pickle.load(stream)))
    return sorted(found, key=lambda contribution: contribution.index)


def condense(contributions: list[Contribution]) -> bytes:
    """Return contributions, in the order of the group, as a pickle that holds equal neighbours only once."""

    def content(one: Contribution) -> tuple[str, int, bytes, int]:
        # Contributions in parts are stored under keys of their own.
        return one.operation, one.parts, one.inline, one.index if one.parts else 0

    runs = [[*members] for _, members in itertools.groupby(contributions, content)]
    return pickle.dumps([(dataclasses.astuple(members[0]), len(members)) for members in runs], pickle.HIGHEST_PROTOCOL)


def expand(condensed: bytes) -> list[Contribution]:
    """Return the contributions that :func:`condense` was given."""
    firsts = [(Contribution(*fields), count) for fields, count in pickle.loads(condensed)]
    return [
        dataclasses.replace(first, index=first.index + offset) for first, count in firsts for offset in range(count)
    ]
