"""What a checkpoint's directory tells without its files being read."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from det_lightning.checkpoint.format.layout import LOAD_DATA_FILE, METADATA_FILE, RESUME_FILE, STATE_FILES, is_shallow
from det_lightning.checkpoint.format.manifest import find_metadata_damage
from det_lightning.checkpoint.storage.location import Location

# Floats count exactly up to here.
_MAX_STEPS = 2**53
# No file is of the year 10000, and no clock is wrong by more than a day without anybody noticing.
_LATEST_TIME_S = 253402300800.0
_TOLERANCE_S = 86400.0

logger = logging.getLogger("det_lightning.checkpoint")


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
class MetadataNotes:
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


def notes_in(metadata: Mapping[str, Any]) -> MetadataNotes:
    """Return what the content of ``metadata.json`` notes, with the types that it should have."""
    steps, metric = metadata.get("steps_completed"), metadata.get("metric")
    metric = metric if isinstance(metric, dict) else {}
    time_s = _number(metadata.get("time"))
    return MetadataNotes(
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
