"""The newest checkpoint, found by the runs that wrote the checkpoints and the runs that those runs resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from det_lightning.checkpoint.storage.metadata import (
    CheckpointInfo,
    count_or_zero,
    plausible_time,
    text_or_none,
    time_written,
)

#: Entries of ``metadata.json``: the run that wrote a checkpoint, and the checkpoint that it resumed from.
RUN_KEY = "run"
PARENT_KEY = "resumed_from"


@dataclasses.dataclass(frozen=True)
class Ancestry:
    """The age and origin of a checkpoint: ``written`` is the storage's file time, ``time`` the time in the metadata.

    ``run`` identifies the run: the trial for releases that noted no run, and the checkpoint itself for other programs.
    ``parent`` is the id of the checkpoint from which the run resumed.
    """

    id: str
    run: Hashable
    steps_completed: int
    written: float
    time: float | None = None
    parent: str | None = None
    parent_run: Hashable | None = None
    parent_steps: int = 0

    @property
    def age(self) -> tuple[int, float, float]:
        """A key that grows from one checkpoint of a run to the next."""
        return self.steps_completed, self.written, self.time or 0.0


def read_ancestry(info: CheckpointInfo) -> Ancestry:
    """Return the age and origin of a checkpoint."""
    metadata = info.metadata
    written = time_written(metadata, info.metadata_written)
    parent: Mapping[str, Any] = link if isinstance(link := metadata.get(PARENT_KEY), dict) else {}
    trial = text_or_none(metadata.get("trial"))
    own = ("checkpoint", info.id) if not trial else ("trial", text_or_none(metadata.get("experiment")) or None, trial)
    return Ancestry(
        id=info.id,
        run=text_or_none(metadata.get(RUN_KEY)) or own,
        steps_completed=count_or_zero(metadata.get("steps_completed")),
        written=written or 0.0,
        time=plausible_time(metadata.get("time"), written),
        parent=text_or_none(parent.get("checkpoint")) or None,
        parent_run=text_or_none(parent.get("run")) or None,
        parent_steps=count_or_zero(parent.get("steps_completed")),
    )


def newest_first(checkpoints: Iterable[Ancestry]) -> Iterator[str]:
    """Yield the ids of checkpoints, newest first.

    Within a run, more batches mean newer; a run is newer than the run before. Among unrelated runs the last write
    decides, by the storage's own file times.
    """
    left = {checkpoint.id: checkpoint for checkpoint in checkpoints}
    while left:
        newest = _Runs(left).newest()
        del left[newest.id]
        yield newest.id


class _Runs:
    """The runs that wrote some checkpoints; the tip of each run is the newest checkpoint."""

    def __init__(self, checkpoints: Mapping[str, Ancestry]) -> None:
        self._checkpoints = checkpoints
        self._members: dict[Hashable, list[Ancestry]] = {}
        for checkpoint in checkpoints.values():
            self._members.setdefault(checkpoint.run, []).append(checkpoint)
        self._tips = {run: max(members, key=lambda one: one.age) for run, members in self._members.items()}

    def newest(self) -> Ancestry:
        pairs = [(tip, before) for tip in self._tips.values() if (before := self._run_before(tip)) is not None]
        continued = {before for tip, before in pairs if self._tips[before].steps_completed <= tip.parent_steps}
        # det_lightning writes no cycles of runs that resume one another; if there are only cycles, the times decide.
        ends = [tip for run, tip in self._tips.items() if run not in continued] or [*self._tips.values()]
        return max(ends, key=self._last_write)

    def _last_write(self, tip: Ancestry) -> tuple[float, float, float, int]:
        own = max(one.written for one in self._members[tip.run])
        return max(self._list_writes(tip)), own, tip.time or 0.0, tip.steps_completed

    def _list_writes(self, tip: Ancestry) -> Iterator[float]:
        """Yield the times of all checkpoints of a run, and of the runs before as far as the run resumed them."""
        run: Hashable | None = tip.run
        seen: set[Hashable] = set()
        last_step = tip.steps_completed
        while run is not None and run not in seen:
            seen.add(run)
            yield from (one.written for one in self._members[run] if one.steps_completed <= last_step)
            last_step = self._tips[run].parent_steps
            run = self._run_before(self._tips[run])

    def _run_before(self, tip: Ancestry) -> Hashable | None:
        """Return the run that another run resumed, if any checkpoint is left."""
        if tip.parent_run in self._tips and tip.parent_run != tip.run:
            return tip.parent_run
        parent = self._checkpoints.get(tip.parent or "")
        return None if parent is None or parent.run == tip.run else parent.run
