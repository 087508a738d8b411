"""What a checkpoint's directory tells without its files being read, and which checkpoint is the newest."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from det_lightning.checkpoint.format.layout import LOAD_DATA_FILE, METADATA_FILE, RESUME_FILE, STATE_FILES, is_shallow
from det_lightning.checkpoint.format.manifest import find_metadata_damage
from det_lightning.checkpoint.storage.location import Location

logger = logging.getLogger(__name__)

# Floats count exactly up to here.
_MAX_STEPS = 2**53
# No file is of the year 10000, and no clock is wrong by more than a day without anybody noticing.
_LATEST_TIME_S = 253402300800.0
_TOLERANCE_S = 86400.0


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """What can be told of a checkpoint from its directory and its ``metadata.json``.

    Attributes:
        id: its id.
        complete: it was written to its end.
        metadata: content of ``metadata.json``; empty if there is none, or none that can be read.
        size_bytes: size of all files.
        written: when its latest file was written, in seconds since 1970; None if the storage does not tell.
    """

    id: str
    complete: bool
    metadata: dict[str, Any]
    size_bytes: int
    written: float | None


@dataclasses.dataclass(frozen=True)
class CheckpointNotes:
    """What ``metadata.json`` notes of a checkpoint; None for what it does not note, or notes in an impossible way.

    Attributes:
        steps_completed: number of batches trained on.
        metric_name: name of the searcher metric.
        metric: its value, which may be NaN.
        smaller_is_better: whether a smaller value is an improvement.
        time_s: when it was written, in seconds since 1970.
        trial: name of the trial.
        experiment: name of the experiment.
    """

    steps_completed: int | None = None
    metric_name: str | None = None
    metric: float | None = None
    smaller_is_better: bool = True
    time_s: float | None = None
    trial: str | None = None
    experiment: str | None = None


def notes_in(metadata: Mapping[str, Any]) -> CheckpointNotes:
    """Return what the content of ``metadata.json`` notes, with the types that it should have."""
    steps = metadata.get("steps_completed")
    metric = metadata.get("metric")
    metric = metric if isinstance(metric, dict) else {}
    time_s = _number(metadata.get("time"))
    return CheckpointNotes(
        steps_completed=steps if type(steps) is int and 0 <= steps <= _MAX_STEPS else None,
        metric_name=_text(metric.get("name")),
        metric=_number(metric.get("value")),
        smaller_is_better=metric.get("smaller_is_better") is not False,
        time_s=time_s if time_s is not None and math.isfinite(time_s) else None,
        trial=_text(metadata.get("trial")),
        experiment=_text(metadata.get("experiment")),
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        float(value)
    except OverflowError:
        return None
    return value


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def describe(checkpoint: Location) -> CheckpointInfo:
    """Return what can be told of the checkpoint in a directory."""
    files = checkpoint.find_files()
    times = [time for entry in files.values() if (time := _time_of(entry)) is not None]
    return CheckpointInfo(
        id=checkpoint.name,
        # Up to 0.17.7 there was neither; see require_complete().
        complete=any(name in files for name in STATE_FILES)
        and (METADATA_FILE in files or not {LOAD_DATA_FILE, RESUME_FILE} & files.keys()),
        metadata=read_metadata(checkpoint),
        size_bytes=sum(entry.get("size") or 0 for entry in files.values()),
        written=max(times, default=None),
    )


def read_metadata(checkpoint: Location) -> dict[str, Any]:
    """Return the content of ``metadata.json``; empty if it is missing or damaged, which its checksum tells."""
    try:
        content = json.loads((checkpoint / METADATA_FILE).read())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or not is_shallow(content):
        return {}
    if (damage := find_metadata_damage(content)) is not None:
        logger.warning("The metadata of %s is damaged, and is not used: %s.", checkpoint, damage)
        return {}
    return content


def modified(file: Location) -> float | None:
    """Return when a file was modified, in seconds since 1970; None if the file system does not tell."""
    return _time_of(file.fs.info(file.path))


def plausible_time(told: Any, written: float | None) -> float | None:
    """Return the time that metadata tell, in seconds since 1970; None if the checkpoint cannot be of that time.

    Args:
        told: what stands there.
        written: when the storage says that its files were written; None if it does not.
    """
    if not isinstance(told, int | float) or isinstance(told, bool):
        return None
    latest = _LATEST_TIME_S if written is None else written + _TOLERANCE_S
    return float(told) if 0 <= told <= latest else None


def _time_of(info: Mapping[str, Any]) -> float | None:
    """Return when a file was modified; each file system has its own name and type for that."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = info.get(key)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


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
        "run": _text_or_none(known.get(_RUN_KEY)),
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
            parent=_text_or_none(parent.get("checkpoint")),
            parent_run=_text_or_none(parent.get("run")),
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
    if run := _text_or_none(metadata.get(_RUN_KEY)):
        return run
    trial = _text_or_none(metadata.get("trial"))
    return (
        ("checkpoint", checkpoint_id) if trial is None else ("trial", _text_or_none(metadata.get("experiment")), trial)
    )


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
