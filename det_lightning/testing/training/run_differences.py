"""The first difference of two runs, in the order of time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from det_lightning.testing.observation.digests import amount, equal, flat, shown
from det_lightning.testing.observation.observer import CHECKPOINTED, Happening
from det_lightning.testing.training.execution import ObservedRun

__all__ = ["RunDifference", "first_difference", "happenings_after"]


@dataclasses.dataclass(frozen=True)
class RunDifference:
    """One thing in which two runs differ.

    Attributes:
        kind: ``"metric"``, ``"validation metric"``, ``"learning rate"``, ``"weights"``, ``"event"``,
            ``"optimizer"``, ``"scheduler"``, ``"callback"`` or ``"random state"``.
        name: of the metric, parameter, ...
        place: where in the runs.
        values: in either run; None where one has nothing there.
        runs: the names of the runs.
    """

    kind: str
    name: str
    place: str
    values: tuple[Any, Any]
    runs: tuple[str, str]

    def __str__(self) -> str:
        """Return a sentence with all of that."""
        one, other = self.values
        if self.kind == "event":
            return f"{self.place}: {shown(one)} in {self.runs[0]}, {shown(other)} in {self.runs[1]}."
        what = f"{self.kind} {self.name}" if self.kind in ("learning rate", "data") else f"{self.kind} {self.name!r}"
        apart = amount(one, other)
        by = f", {apart:.3g} apart" if apart else ""
        return f"{what.strip()} {self.place}: {shown(one)} in {self.runs[0]}, {shown(other)} in {self.runs[1]}{by}."


def first_difference(one: ObservedRun, other: ObservedRun, after: int | None = None) -> RunDifference | None:
    """Return the first thing in which two runs are not equal to the bit; None if they are.

    Args:
        one: a run.
        other: another one.
        after: ``other`` went on from the checkpoint of ``one`` after so many batches.
    """
    names = (one.name, other.name)
    happened = one.observer.happenings if after is None else happenings_after(one.observer.happenings, after)
    found = _first_of_events(happened, other.observer.happenings, names)
    return found or next(_differing_ends(one.final, other.final, names), None)


def happenings_after(happenings: Sequence[Happening], batches: int) -> list[Happening]:
    """Return what happened after the checkpoint that was written after ``batches`` batches."""
    ends = [i for i, entry in enumerate(happenings) if entry.what == CHECKPOINTED and entry.batches == batches]
    return list(happenings[ends[0] + 1 :]) if ends else []


def _first_of_events(
    one: Sequence[Happening], other: Sequence[Happening], names: tuple[str, str]
) -> RunDifference | None:
    for mine, theirs in zip(one, other, strict=False):
        if (mine.what, mine.batches) != (theirs.what, theirs.batches):
            return RunDifference("event", "", "what happens", (mine.place, theirs.place), names)
        found = next(_differing_values(mine, theirs, names), None)
        if found is not None:
            return found
    if len(one) != len(other):
        longer = (one if len(one) > len(other) else other)[min(len(one), len(other))]
        values = (longer.place, "nothing") if len(one) > len(other) else ("nothing", longer.place)
        return RunDifference("event", "", "what happens at the end", values, names)
    return None


def _differing_values(mine: Happening, theirs: Happening, names: tuple[str, str]) -> Iterator[RunDifference]:
    for key in [*mine.values, *(key for key in theirs.values if key not in mine.values)]:
        values = mine.values.get(key), theirs.values.get(key)
        if not equal(*values):
            kind, name = key
            place = f"after {mine.place}" if kind == "weights" else f"of {mine.place}"
            if kind == "argument":
                kind = f"{mine.what} argument"
            yield RunDifference(kind, name, place, values, names)


def _differing_ends(
    one: Mapping[str, Any], other: Mapping[str, Any], names: tuple[str, str]
) -> Iterator[RunDifference]:
    for kind in one:
        mine, theirs = dict(flat(one[kind])), dict(flat(other.get(kind)))
        for path in [*mine, *(path for path in theirs if path not in mine)]:
            values = mine.get(path), theirs.get(path)
            if not equal(*values):
                yield RunDifference(kind, path, "at the end", values, names)
