"""The facts about a checkpoint without its state, each read when it is first asked for; newest = written last."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.layout import as_time, find_metadata_damage, leads_out
from det_lightning.checkpoint.storage.location import Location, explain_errors, find_time, is_name, is_own_id
from det_lightning.escaping import get_logger
from det_lightning.files.strict_json import as_number, is_shallow

_Result = TypeVar("_Result")

logger = get_logger(__name__)

_REQUESTS_AT_ONCE = 16
# So many directories show whether there are checkpoints.
_MOST_LOOKS = 8
# In a bucket with more checkpoints than the first number, so many are read to find the newest.
_MANY = 32
_FEW_NEWEST = 4
# Floats represent every integer up to here.
_MAX_STEPS = 2**53
# How far the clocks of a trial, of its storage and of a reader may differ.
_TOLERANCE_S = 3600.0

# A directory with any of these is a checkpoint or a part of one; the first is in all complete ones since release 0.18.
_MARKERS = (layout.METADATA_FILE, layout.LOAD_DATA_FILE, *layout.STATE_FILES)


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


@dataclasses.dataclass(frozen=True, eq=False)
class CheckpointInfo:
    """The facts about a checkpoint from the directory and ``metadata.json``, each read at the first access.

    An access raises a ``StorageError`` if the storage cannot be read. ``directory`` is the checkpoint's location,
    ``listing`` the file system's facts about all files by relative path, if a listing of the whole storage has them.

    Example:
        >>> from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState
        >>> storage = CheckpointStorage("checkpoints")
        >>> _ = storage.write(CheckpointContent({}, TrialState(batches_trained=100)))
        >>> [(info.complete, info.metadata["steps_completed"]) for info in storage.list_checkpoints()]
        [(True, 100)]
    """

    directory: Location
    listing: Mapping[str, Mapping[str, Any]] | None = dataclasses.field(default=None, repr=False)

    @property
    def id(self) -> str:
        """The id."""
        return self.directory.name

    @functools.cached_property
    def files(self) -> Mapping[str, Mapping[str, Any]]:
        """The file system's facts about all files, by relative path."""
        if self.listing is not None:
            return self.listing
        with explain_errors("reading", self.directory):
            return self.directory.find_files()

    @functools.cached_property
    def _names(self) -> set[str]:
        """The names of the files in the directory, without those further down unless a listing has them."""
        if self.listing is not None:
            return {*self.listing}
        with explain_errors("reading", self.directory):
            return self.directory.list_files()

    def has_file(self, name: str) -> bool:
        """Return whether there is a file; ``name`` is a path relative to the checkpoint."""
        if self.listing is not None or "/" not in name:
            return name in self._names
        with explain_errors("reading", self.directory):
            return (self.directory / name).exists()

    def exists(self, complete: bool = False) -> bool:
        """Return whether the directory is a checkpoint or a part of one; if ``complete``, with ``metadata.json``."""
        return any(self.has_file(marker) for marker in (_MARKERS[:1] if complete else _MARKERS))

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """Content of ``metadata.json``; empty if the file is missing, damaged, or a link out of the checkpoint."""
        if self.listing is not None and layout.METADATA_FILE not in self.listing:
            return {}
        with explain_errors("reading", self.directory):
            return _read_metadata(self.directory)

    @functools.cached_property
    def notes(self) -> CheckpointNotes:
        """The notes in ``metadata.json``, if of the right types."""
        steps = self.metadata.get("steps_completed")
        metric = self.metadata.get("metric")
        metric = metric if isinstance(metric, dict) else {}
        return CheckpointNotes(
            steps_completed=steps if type(steps) is int and 0 <= steps <= _MAX_STEPS else None,
            metric_name=_text_or_none(metric.get("name")),
            metric=as_number(metric.get("value")),
            smaller_is_better=metric.get("smaller_is_better") is not False,
            time_s=as_time(self.metadata.get("time")),
            trial=_text_or_none(self.metadata.get("trial")),
            experiment=_text_or_none(self.metadata.get("experiment")),
        )

    @property
    def foreign(self) -> bool:
        """Whether a ``TFKerasTrial`` wrote the checkpoint; det_lightning neither reads nor deletes such checkpoints."""
        return layout.is_of_keras(self._names)

    @property
    def complete(self) -> bool:
        """Whether the checkpoint was written completely."""
        has_state = not self.foreign and any(map(self.has_file, layout.STATE_FILES))
        if not self.has_file(layout.METADATA_FILE):
            return has_state and layout.may_lack_metadata(self._names)
        # The files of a script of the Core API have any names.
        is_of_script = layout.names_no_framework(self.metadata) and not self.has_file(layout.LOAD_DATA_FILE)
        return has_state or (bool(self.metadata) and is_of_script)

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(entry.get("size") or 0 for entry in self.files.values())

    @property
    def written(self) -> float | None:
        """When the latest file was written, in seconds since 1970; None if the storage does not know."""
        return max((time_s for entry in self.files.values() if (time_s := find_time(entry)) is not None), default=None)

    @functools.cached_property
    def file_time(self) -> float | None:
        """When ``metadata.json`` was written, by the storage; what was added by ``annotate`` later does not count."""
        if not self.has_file(layout.METADATA_FILE):
            return self.written
        if self.listing is not None:
            modified_s = find_time(self.listing[layout.METADATA_FILE])
        else:
            with explain_errors("reading", self.directory):
                modified_s = (self.directory / layout.METADATA_FILE).modified_s()
        master = self.metadata.get(layout.MASTER_KEY)
        before = as_time(master.get(layout.WRITTEN_KEY)) if isinstance(master, dict) else None
        return modified_s if before is None or modified_s is None else min(before, modified_s)

    @property
    def time(self) -> float | None:
        """When the checkpoint was written, in seconds since 1970: by the metadata, otherwise by the storage."""
        return self.file_time if self.notes.time_s is None else self.notes.time_s

    def believable_time(self, now: float) -> float | None:
        """Return the time in the metadata or, if that lies in the future after ``now``, the storage's; else None."""
        times = (self.notes.time_s, self.file_time)
        return next((one for one in times if one is not None and one <= now + _TOLERANCE_S), None)


def newest_first(infos: Sequence[CheckpointInfo]) -> Iterator[CheckpointInfo]:
    """Yield the checkpoints of a storage, the one written last first.

    In a large bucket the times of the listing order them, and only the few newest are read.
    """
    left = list(infos)
    at_once = len(left)
    if len(left) > _MANY and left[0].directory.is_object_store:
        left.sort(key=_listed_time, reverse=True)
        at_once = _FEW_NEWEST
    while left:
        call_in_parallel(left[0].directory, lambda info: info.file_time, left[:at_once])
        yield from _sort_newest_first(left[:at_once])
        left = left[at_once:]
        at_once *= 4


def _sort_newest_first(infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return the checkpoints, the one written last first.

    The noted times of a trial grow from one checkpoint to the next, whatever the clock does: a checkpoint whose times
    all lie in the future was written right after the one before.
    """
    now = time.time()
    latest: dict[tuple[str | None, str], float] = {}  # of each trial so far
    ages: dict[str, tuple[float, ...]] = {}
    for info in sorted(infos, key=lambda info: info.time or 0.0):
        notes = info.notes
        trial = (notes.experiment, notes.trial or info.id)
        written = info.believable_time(now)
        latest[trial] = latest.get(trial, 0.0) if written is None else written
        ages[info.id] = (latest[trial], info.time or 0.0, info.file_time or 0.0, notes.steps_completed or 0)
    return sorted(infos, key=lambda info: ages[info.id], reverse=True)


def _listed_time(info: CheckpointInfo) -> float:
    """Return when the latest file was written, of a bucket's listing; ``metadata.json`` may be written again later."""
    entries = [entry for name, entry in info.files.items() if name != layout.METADATA_FILE] or info.files.values()
    return max((find_time(entry) or 0.0 for entry in entries), default=0.0)


def scan(root: Location, complete: bool) -> list[CheckpointInfo]:
    """Return the checkpoints below ``root``, sorted by id, without links; without ``complete``, also parts."""
    if root.is_object_store:  # one listing takes fewer requests than a listing of each directory
        infos = [CheckpointInfo(root / name, files) for name, files in _list_bucket(root).items() if is_name(name)]
    else:
        types = root.list_types()
        infos = [CheckpointInfo(root / name) for name, kind in types.items() if kind == "directory" and is_name(name)]
    return sorted((info for info in infos if _is_there(info, complete)), key=lambda info: info.id)


def _is_there(info: CheckpointInfo, complete: bool) -> bool:
    """Return whether a directory is a checkpoint; one that must not be read, such as ``lost+found``, is none."""
    try:
        return info.exists(complete)
    except errors.StorageError as e:
        if isinstance(e.__cause__, PermissionError):
            return False
        raise


def _list_bucket(root: Location) -> dict[str, dict[str, Mapping[str, Any]]]:
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    try:
        files = root.find_files()
    except FileNotFoundError:  # there is no such bucket
        return found
    for path, entry in files.items():
        name, _, rest = path.partition("/")
        if rest:
            found.setdefault(name, {})[rest] = entry
    return found


def call_in_parallel(root: Location, function: Callable[[Any], _Result], arguments: list[Any]) -> list[_Result]:
    """Call a function that reads from ``root`` with each of ``arguments``; return the results in order.

    Object stores get the requests at once, since each answer takes some milliseconds.
    """
    # A connection such as SFTP's must not be used by two threads at once.
    if not root.is_object_store or len(arguments) < 2:
        return [function(argument) for argument in arguments]
    with explain_errors("reading", root), concurrent.futures.ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        return list(pool.map(function, arguments))


def is_checkpoint(directory: Location) -> bool:
    """Return whether a directory has a file of a checkpoint."""
    return CheckpointInfo(directory).exists()


def require_checkpoint(directory: Location) -> None:
    """Raise a CheckpointNotFound for a directory of checkpoints, with the name of one of them."""
    with explain_errors("looking into", directory):
        if is_checkpoint(directory):
            return
        types = directory.list_types()
        first = find_first(directory, [name for name, kind in types.items() if kind == "directory"])
    if first is not None:
        raise errors.CheckpointNotFound(
            f"{directory} is a directory of checkpoints, not a checkpoint: name a checkpoint, such as "
            f"{first}. CheckpointStorage({str(directory)!r}).newest() returns the newest."
        )


def find_first(root: Location, names: Iterable[str]) -> Location | None:
    """Return a checkpoint among the first directories in ``root``, names of ours first."""
    likely = sorted(names, key=lambda name: (not is_own_id(name), name))[:_MOST_LOOKS]
    return next((root / name for name in likely if is_checkpoint(root / name)), None)


def _read_metadata(checkpoint: Location) -> dict[str, Any]:
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


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None
