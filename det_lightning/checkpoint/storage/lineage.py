"""Which checkpoint is the newest: runs, and the runs that they go on from."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from det_lightning.checkpoint.storage.metadata import plausible_time

__all__ = ["Ancestry", "lineage_notes", "newest_first"]

_RUN_KEY = "run"
_PARENT_KEY = "resumed_from"


def lineage_notes(run_id: str, parent_id: str | None = None, parent: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what the metadata of each checkpoint of a run tell of where it comes from.

    Args:
        run_id: of the run.
        parent_id: id of the checkpoint that the run goes on from; None if it began anew.
        parent: metadata of that checkpoint.
    """
    if parent_id is None:
        return {_RUN_KEY: run_id}
    known = parent or {}
    link = {
        "checkpoint": parent_id,
        "run": _text(known.get(_RUN_KEY)),
        "steps_completed": _count(known.get("steps_completed")),
    }
    return {_RUN_KEY: run_id, _PARENT_KEY: link}


@dataclasses.dataclass(frozen=True)
class Ancestry:
    """A checkpoint, as far as its age goes.

    Attributes:
        id: its id.
        run: tells its run from others. Of releases that noted none the trial counts as one; what another program
            wrote is alone.
        steps_completed: number of batches trained on.
        written: when the storage says that it was written, in seconds since 1970.
        time: when its metadata say so; None if they do not, or cannot be right.
        parent: id of the checkpoint that its run goes on from, None if there is none.
        parent_run: that checkpoint's run, None if it is not known.
        parent_steps: that checkpoint's ``steps_completed``.
    """

    id: str
    run: Hashable
    steps_completed: int
    written: float
    time: float | None = None
    parent: str | None = None
    parent_run: Hashable | None = None
    parent_steps: int = 0

    @classmethod
    def from_metadata(cls, checkpoint_id: str, metadata: Mapping[str, Any], written: float | None) -> Ancestry:
        """Read what ``metadata.json`` tells; values that make no sense count as missing."""
        link = metadata.get(_PARENT_KEY)
        parent: Mapping[str, Any] = link if isinstance(link, dict) else {}
        return cls(
            id=checkpoint_id,
            run=_run_of(checkpoint_id, metadata),
            steps_completed=_count(metadata.get("steps_completed")),
            written=written or 0.0,
            time=plausible_time(metadata.get("time"), written),
            parent=_text(parent.get("checkpoint")),
            parent_run=_text(parent.get("run")),
            parent_steps=_count(parent.get("steps_completed")),
        )

    @property
    def age(self) -> tuple[int, float, float]:
        """Grows from one checkpoint of a run to the next."""
        return self.steps_completed, self.written, self.time or 0.0


def newest_first(checkpoints: Iterable[Ancestry]) -> Iterator[str]:
    """Yield the ids of checkpoints, each the newest of those that are left.

    Within a run it is the one with the most steps; a run is newer than what it goes on from. Of runs that do not go on
    from one another the one counts whose last write is the latest, by the storage's own file times.
    """
    left = {checkpoint.id: checkpoint for checkpoint in checkpoints}
    while left:
        newest = _newest(left)
        del left[newest.id]
        yield newest.id


def _newest(checkpoints: Mapping[str, Ancestry]) -> Ancestry:
    runs: dict[Hashable, list[Ancestry]] = {}
    for checkpoint in checkpoints.values():
        runs.setdefault(checkpoint.run, []).append(checkpoint)
    tips = {run: max(members, key=lambda one: one.age) for run, members in runs.items()}
    continued = set()
    for tip in tips.values():
        before = _run_before(tip, checkpoints, tips)
        if before is not None and tips[before].steps_completed <= tip.parent_steps:
            continued.add(before)
    # What says that it goes on from itself in a circle was not written by this library; then the times decide.
    ends = [tip for run, tip in tips.items() if run not in continued] or [*tips.values()]

    def last_write(tip: Ancestry) -> tuple[float, float, float, int]:
        own = max(one.written for one in runs[tip.run])
        return max(_writes_of(tip, checkpoints, runs, tips)), own, tip.time or 0.0, tip.steps_completed

    return max(ends, key=last_write)


def _writes_of(
    tip: Ancestry,
    checkpoints: Mapping[str, Ancestry],
    runs: Mapping[Hashable, list[Ancestry]],
    tips: Mapping[Hashable, Ancestry],
) -> Iterator[float]:
    """Yield the times at which a run was written, and what it goes on from."""
    run: Hashable | None = tip.run
    seen: set[Hashable] = set()
    last_step = tip.steps_completed
    while run is not None and run not in seen:
        seen.add(run)
        yield from (one.written for one in runs[run] if one.steps_completed <= last_step)
        last_step = tips[run].parent_steps
        run = _run_before(tips[run], checkpoints, tips)


def _run_before(
    tip: Ancestry, checkpoints: Mapping[str, Ancestry], tips: Mapping[Hashable, Ancestry]
) -> Hashable | None:
    """Return the run that another one goes on from, if anything is left of it."""
    if tip.parent_run in tips and tip.parent_run != tip.run:
        return tip.parent_run
    parent = checkpoints.get(tip.parent or "")
    return None if parent is None or parent.run == tip.run else parent.run


def _run_of(checkpoint_id: str, metadata: Mapping[str, Any]) -> Hashable:
    if run := _text(metadata.get(_RUN_KEY)):
        return run
    trial = _text(metadata.get("trial"))
    return ("checkpoint", checkpoint_id) if trial is None else ("trial", _text(metadata.get("experiment")), trial)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
