"""What the ranks of a run publish about themselves, and messages about which of them wait for which."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence


@dataclasses.dataclass
class RankStatus:
    """What one rank publishes about itself."""

    rank: int
    tick: int  # how often it has published
    where: str
    waits: bool
    still_s: float  # how long it has not moved
    stuck: bool  # whether it should have moved since a signal
    awaited: list[int]  # the ranks that it waits for, if known
    noticed: bool = False  # whether there was a message about it


def describe_wait(own: RankStatus, statuses: Sequence[RankStatus], silent: Collection[int]) -> str:
    """Return a sentence that says where ``own`` waits for which ranks, and where those are."""
    alike = [found for found in statuses if found.where == own.where and found.rank not in silent]
    others = [found for found in statuses if found not in alike]
    awaited = [found.rank for found in others if found.rank in own.awaited] or [found.rank for found in others]
    sentence = _describe_alike(alike, own.still_s)
    if awaited and own.waits:
        sentence += f", for {name_ranks(awaited)}"
    by_place: dict[str, list[RankStatus]] = {}
    for found in others:
        by_place.setdefault("" if found.rank in silent else found.where, []).append(found)
    rest = [_describe_alike(there, there[0].still_s) for where, there in by_place.items() if where]
    if unheard := by_place.get(""):
        rest.append(f"nothing is heard of {name_ranks([found.rank for found in unheard])}")
    sentence = "; ".join([sentence, *rest]) if others else f"{sentence}, where all ranks are"
    return f"{sentence[0].upper()}{sentence[1:]}."


def _describe_alike(statuses: Sequence[RankStatus], still_s: float) -> str:
    """Return where ranks at the same place are, and for how long."""
    first = statuses[0]
    several = len(statuses) > 1
    if still_s < 1:
        verb = "are in" if several else "is in"
    else:
        verb = f"{'have' if several else 'has'} {'waited' if first.waits else 'been'} {still_s:.0f} s in"
    return f"{name_ranks([found.rank for found in statuses])} {verb} {first.where}"


def name_ranks(ranks: Collection[int]) -> str:
    """Return ``"rank 1"`` or ``"ranks 1, 3"``."""
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
