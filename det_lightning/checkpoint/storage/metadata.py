"""The facts about a checkpoint without its state: completeness, size, times, and the notes in ``metadata.json``."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.manifest import find_metadata_damage, leads_out
from det_lightning.checkpoint.storage.location import Location, explain_errors, is_own_id
from det_lightning.escaping import get_logger
from det_lightning.files.strict_json import MAX_SMALL_FILE_BYTES, as_number, is_shallow

_Result = TypeVar("_Result")

logger = get_logger(__name__)

_REQUESTS_AT_ONCE = 16
# So many directories show whether there are checkpoints.
_MOST_LOOKS = 8
# Floats represent every integer up to here.
_MAX_STEPS = 2**53
# The year 10000, and how far the clocks of a trial and of its storage may differ.
_LATEST_TIME_S = 253402300800.0
_TOLERANCE_S = 86400.0

# A directory with any of these is a checkpoint or a part of one; the first is in all complete ones since release 0.18.
_MARKERS = (layout.METADATA_FILE, layout.LOAD_DATA_FILE, *layout.STATE_FILES)


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """The facts about a checkpoint from the directory and ``metadata.json``.

    Attributes:
        id: the id.
        complete: whether the checkpoint was written completely.
        metadata: content of ``metadata.json``; empty if the file is missing or cannot be read.
        size_bytes: size of all files.
        written: when the latest file was written, in seconds since 1970; None if the storage does not know.
        metadata_written: when ``metadata.json`` was written; None also if there is none.
        markers: names of the files that make the directory a checkpoint.
        foreign: whether a ``TFKerasTrial`` wrote the checkpoint; det_lightning neither reads nor deletes such
            checkpoints.

    Example:
        >>> from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState
        >>> storage = CheckpointStorage("checkpoints")
        >>> _ = storage.write(CheckpointContent({}, TrialState(batches_trained=100)))
        >>> [(info.complete, info.metadata["steps_completed"]) for info in storage.survey()]
        [(True, 100)]
    """

    id: str
    complete: bool
    metadata: dict[str, Any]
    size_bytes: int
    written: float | None
    metadata_written: float | None = None
    markers: frozenset[str] = frozenset()
    foreign: bool = False


@dataclasses.dataclass(frozen=True)
class CheckpointNotes:
    """The notes in ``metadata.json``; missing and impossible notes are None. ``time_s`` is in seconds since 1970."""

    steps_completed: int | None = None
    metric_name: str | None = None
    metric: float | None = None
    smaller_is_better: bool = True
    time_s: float | None = None
    trial: str | None = None
    experiment: str | None = None


def read_notes(metadata: Mapping[str, Any]) -> CheckpointNotes:
    """Return the notes in the content of ``metadata.json``, if of the right types."""
    steps = metadata.get("steps_completed")
    metric = metadata.get("metric")
    metric = metric if isinstance(metric, dict) else {}
    time_s = _number(metadata.get("time"))
    return CheckpointNotes(
        steps_completed=steps if type(steps) is int and 0 <= steps <= _MAX_STEPS else None,
        metric_name=text_or_none(metric.get("name")),
        metric=as_number(metric.get("value")),
        smaller_is_better=metric.get("smaller_is_better") is not False,
        time_s=time_s if time_s is not None and math.isfinite(time_s) else None,
        trial=text_or_none(metadata.get("trial")),
        experiment=text_or_none(metadata.get("experiment")),
    )


def _number(value: Any) -> float | None:
    # An integer may be larger than any float.
    is_number = type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
    return value if is_number else None


def text_or_none(value: Any) -> str | None:
    """Return a text, and None for anything else."""
    return value if isinstance(value, str) else None


def count_or_zero(value: Any) -> int:
    """Return a number of batches, and 0 for anything else."""
    return value if type(value) is int and value >= 0 else 0


def describe(checkpoint: Location, files: Mapping[str, Mapping[str, Any]] | None = None) -> CheckpointInfo:
    """Return the facts about the checkpoint in a directory, with ``files`` if listed already."""
    files = checkpoint.find_files() if files is None else files
    entry = files.get(layout.METADATA_FILE)
    is_small = entry is not None and (entry.get("size") or 0) <= MAX_SMALL_FILE_BYTES
    metadata = read_metadata(checkpoint) if is_small else {}  # others would fill the memory
    times = [time for entry in files.values() if (time := _find_time(entry)) is not None]
    foreign = layout.is_of_keras(files)
    has_state = not foreign and any(name in files for name in layout.STATE_FILES)
    # The files of a script of the Core API have any names.
    is_of_script = bool(metadata) and layout.names_no_framework(metadata) and layout.LOAD_DATA_FILE not in files
    return CheckpointInfo(
        id=checkpoint.name,
        complete=has_state and layout.may_lack_metadata(files) if entry is None else has_state or is_of_script,
        metadata=metadata,
        size_bytes=sum(entry.get("size") or 0 for entry in files.values()),
        written=max(times, default=None),
        metadata_written=None if entry is None else _find_time(entry),
        markers=frozenset(files.keys() & _MARKERS),
        foreign=foreign,
    )


def call_in_parallel(root: Location, function: Callable[[Any], _Result], arguments: list[Any]) -> list[_Result]:
    """Call a function that reads from ``root`` with each of ``arguments``; return the results in order.

    Object stores get the requests at once, since each answer takes some milliseconds.
    """
    # A connection such as SFTP's must not be used by two threads at once.
    if not root.is_object_store or len(arguments) < 2:
        return [function(argument) for argument in arguments]
    with concurrent.futures.ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        return list(pool.map(function, arguments))


def list_markers(complete: bool) -> tuple[str, ...]:
    """Return the names of files that show a checkpoint; if not ``complete``, also a part of a checkpoint."""
    return _MARKERS[:1] if complete else _MARKERS


def is_checkpoint(directory: Location, types: Mapping[str, str] | None = None) -> bool:
    """Return whether a directory has a file of a checkpoint, given the types of the entries if known."""
    types = directory.list_types() if types is None else types
    for marker in list_markers(complete=False):
        first, _, rest = marker.partition("/")
        if first in types and ((directory / marker).exists() if rest else types[first] == "file"):
            return True
    return False


def require_checkpoint(directory: Location) -> None:
    """Raise a CheckpointNotFound for a directory of checkpoints, with the name of one of them."""
    with explain_errors("looking into", directory):
        types = directory.list_types()
        if is_checkpoint(directory, types):
            return
        first = find_first(directory, [name for name, kind in types.items() if kind == "directory"])
    if first is not None:
        raise errors.CheckpointNotFound(
            f"{directory} is a directory of checkpoints, not a checkpoint: name a checkpoint, such as "
            f"{first}. CheckpointStorage({str(directory)!r}).newest() returns the newest."
        )


def find_first(root: Location, names: Iterable[str]) -> Location | None:
    """Return a checkpoint among the first directories in ``root``, those with names of ours before others."""
    likely = sorted(names, key=lambda name: (not is_own_id(name), name))[:_MOST_LOOKS]
    return next((root / name for name in likely if is_checkpoint(root / name)), None)


def glance(checkpoint: Location) -> CheckpointInfo | None:
    """Return the facts about a complete checkpoint from ``metadata.json`` alone; None if the checkpoint is gone."""
    try:
        entry = checkpoint.fs.info((checkpoint / layout.METADATA_FILE).path)
    except FileNotFoundError:  # another run has just deleted it
        return None
    return describe(checkpoint, {layout.METADATA_FILE: entry})


def read_metadata(checkpoint: Location) -> dict[str, Any]:
    """Return the content of ``metadata.json``; empty if the file is missing, too large, or damaged.

    The result is also empty for a link that leads out of the checkpoint.
    """
    if checkpoint.is_local and leads_out(checkpoint.local_path, checkpoint.local_path / layout.METADATA_FILE):
        logger.warning("The metadata of %s is a link that leads out of the checkpoint, and is not used.", checkpoint)
        return {}
    try:
        content = json.loads((checkpoint / layout.METADATA_FILE).read())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or not is_shallow(content):
        return {}
    if (damage := find_metadata_damage(content)) is not None:
        logger.warning("The metadata of %s is damaged, and is not used: %s.", checkpoint, damage)
        return {}
    return content


def read_time(file: Location) -> float | None:
    """Return when a file was modified, in seconds since 1970; None if the file system does not know."""
    return _find_time(file.fs.info(file.path))


def plausible_time(noted: Any, written: float | None) -> float | None:
    """Return a time noted in metadata; None if impossible for a checkpoint with files ``written`` at that time."""
    time_s = _number(noted)
    latest = _LATEST_TIME_S if written is None else written + _TOLERANCE_S
    return float(time_s) if time_s is not None and 0 <= time_s <= latest else None


def time_written(metadata: Mapping[str, Any], modified_s: float | None) -> float | None:
    """Return when a checkpoint was written, given the time at which ``metadata.json`` was modified.

    Adding the master's knowledge later modified the file; the time before is noted then.
    """
    master = metadata.get(layout.MASTER_KEY)
    before = plausible_time(master.get(layout.WRITTEN_KEY), modified_s) if isinstance(master, dict) else None
    return modified_s if before is None or modified_s is None else min(before, modified_s)


def _find_time(info: Mapping[str, Any]) -> float | None:
    """Return when a file was modified; each file system has a name and a type of the entry."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = info.get(key)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
