"""A small record of the checkpoints of a trial, kept beside them: what retention needs to know and no file tells."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR, METADATA_FILE
from det_lightning.checkpoint.retention.rule import CheckpointRecord
from det_lightning.checkpoint.storage.leases import Lease
from det_lightning.checkpoint.storage.location import Location, explain_errors
from det_lightning.checkpoint.storage.metadata import modified, notes_in, plausible_time, read_metadata
from det_lightning.checkpoint.storage.paths import bookkeeping_path

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def is_trial_name(name: str) -> bool:
    """Tell whether a trial or an experiment of this name can have an index, whose file is named like it."""
    return _NAME.fullmatch(name) is not None and not name.startswith(".")


def lock_folder(root: Location) -> Location:
    """Return the directory of the locks that are held while an index is changed."""
    return bookkeeping_path(root, "locks")


def _index_dir(root: Location) -> Location:
    return bookkeeping_path(root, "index")


def _index_file(root: Location, experiment: str, trial: str) -> Location:
    return bookkeeping_path(root, "index", experiment, f"{trial}.json")


@dataclasses.dataclass
class _IndexContent:
    """What the file of an index holds."""

    metric_name: str | None
    smaller_is_better: bool
    records: dict[str, CheckpointRecord]


class TrialIndex:
    """The checkpoints of one trial, in ``<root>/.det_lightning/index/<experiment>/<trial>.json``.

    Several processes may change it, one after another. Where its file is damaged it is made again from the metadata of
    the checkpoints.

    Args:
        root: of the storage.
        experiment: name of the experiment that the trial belongs to.
        trial: name of the trial.
        metric_name: name of the searcher metric.
        smaller_is_better: whether a smaller value of it is an improvement.

    Raises:
        ValueError: a name cannot be the name of a file.
        StorageError: the index cannot be read.
    """

    def __init__(
        self,
        root: Location,
        experiment: str,
        trial: str,
        metric_name: str | None = None,
        smaller_is_better: bool = True,
    ) -> None:
        for what, name in (("experiment", experiment), ("trial", trial)):
            if not is_trial_name(name):
                raise ValueError(
                    f"The name of the {what} becomes that of a file: letters, digits, '.', '_' and '-', at most 128; "
                    f"got {name!r}."
                )
        self.experiment = experiment
        self.trial = trial
        self.metric_name = metric_name
        self.smaller_is_better = smaller_is_better
        self._root = root
        self._file = _index_file(root, experiment, trial)
        self._included: dict[str, CheckpointRecord] = {}
        self._records = _read(root, experiment, trial).records

    @property
    def records(self) -> list[CheckpointRecord]:
        """The trial's checkpoints, the oldest first."""
        return sorted(self._records.values(), key=lambda record: record.order)

    def experiment_records(self) -> list[CheckpointRecord]:
        """Return the checkpoints of all trials of the experiment."""
        others = [index for index in read_indexes(self._root, self.experiment) if index.trial != self.trial]
        return [*self.records, *(record for index in others for record in index.records)]

    def include(self, record: CheckpointRecord) -> None:
        """Take a checkpoint into account, without writing it down yet."""
        self._included[record.id] = record
        self._records.setdefault(record.id, record)

    def add(self, record: CheckpointRecord) -> None:
        """Note a complete checkpoint."""
        with self._changing():
            self._records[record.id] = record

    def note_metric(self, steps_completed: int, metric: float) -> bool:
        """Note the metric of a validation for the latest checkpoint, if it was written at the same batch.

        Returns:
            Whether it was.
        """
        if not self._may_take_metric(steps_completed):
            return False
        with self._changing():
            if (record := self._may_take_metric(steps_completed)) is None:
                return False
            self._records[record.id] = dataclasses.replace(record, metric=metric)
        return True

    def _may_take_metric(self, steps_completed: int) -> CheckpointRecord | None:
        latest = self.records[-1] if self._records else None
        has_room = latest is not None and latest.steps_completed == steps_completed and latest.metric is None
        return latest if has_room else None

    def remove(self, checkpoint_ids: list[str]) -> None:
        """Forget checkpoints."""
        with self._changing():
            for checkpoint_id in checkpoint_ids:
                self._included.pop(checkpoint_id, None)
                self._records.pop(checkpoint_id, None)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Read what other processes have noted, and write the file when the block has changed the records."""
        digest = hashlib.sha256(self._file.path.encode()).hexdigest()[:32]
        with explain_errors(f"writing {self._file}"), Lease.wait_for(lock_folder(self._root) / f"{digest}.json"):
            self._records = {**self._included, **_read(self._root, self.experiment, self.trial).records}
            yield
            self._write()

    def _write(self) -> None:
        content = {
            "experiment": self.experiment,
            "trial": self.trial,
            "metric": self.metric_name,
            "smaller_is_better": self.smaller_is_better,
            "checkpoints": [dataclasses.asdict(record) for record in self.records],
        }
        if self._file.is_local:  # what was left by earlier runs that were killed right here
            for unfinished in self._file.local_path.parent.glob(f".{self._file.name}.*.tmp"):
                unfinished.unlink(missing_ok=True)
        self._file.write(json.dumps(content, indent=1).encode("utf-8"))


def read_indexes(root: Location, experiment: str | None = None) -> list[TrialIndex]:
    """Return the indexes of all trials in a storage, or of those of one experiment.

    Raises:
        StorageError: the storage cannot be read.
    """
    with explain_errors(f"reading the index in {root}"):
        experiments = _index_dir(root).list_names() if experiment is None else [experiment]
        found = []
        for name in filter(is_trial_name, experiments):
            for file in (_index_dir(root) / name).list_names():
                if file.endswith(".json") and is_trial_name(file.removesuffix(".json")):
                    found.append(_read_whole(root, name, file.removesuffix(".json")))
    return found


def _read_whole(root: Location, experiment: str, trial: str) -> TrialIndex:
    content = _read(root, experiment, trial)
    return TrialIndex(root, experiment, trial, content.metric_name, content.smaller_is_better)


def _read(root: Location, experiment: str, trial: str) -> _IndexContent:
    """Return what an index holds; if its file is damaged, what it should hold."""
    file = _index_file(root, experiment, trial)
    with explain_errors(f"reading {file}"):
        if not file.exists():
            return _IndexContent(None, True, {})
        content = file.read()
    try:
        return _parse(content)
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        logger.warning("The index %s is damaged (%s). It is made again from the checkpoints.", file, e)
    with explain_errors(f"reading {root}"):
        return _rebuild(root, experiment, trial)


def _parse(content: bytes) -> _IndexContent:
    """Return what the file of an index holds; raise if it is no such file."""
    parsed = json.loads(content)
    if not isinstance(parsed, dict):
        raise TypeError("it holds no object")
    records = [_checked(CheckpointRecord(**entry)) for entry in parsed["checkpoints"]]
    metric_name = parsed.get("metric")
    return _IndexContent(
        metric_name if isinstance(metric_name, str) else None,
        bool(parsed.get("smaller_is_better", True)),
        {record.id: record for record in records},
    )


def _checked(record: CheckpointRecord) -> CheckpointRecord:
    numbers = [record.steps_completed, record.order, 0.0 if record.metric is None else record.metric]
    if (
        not all(isinstance(name, str) for name in (record.id, record.trial))
        or not all(isinstance(number, int | float) for number in numbers)
        or plausible_time(record.order, None) is None
    ):
        raise TypeError(f"an entry is {record!r:.200}")
    return record


def _rebuild(root: Location, experiment: str, trial: str) -> _IndexContent:
    """Return what the index of a trial should hold, from the metadata of its checkpoints."""
    found = _IndexContent(None, True, {})
    for checkpoint in (root / name for name in root.list_names() if name != BOOKKEEPING_DIR):
        metadata = read_metadata(checkpoint)
        if (metadata.get("experiment"), metadata.get("trial")) != (experiment, trial):
            continue
        record = record_from_metadata(checkpoint, trial, metadata)
        found.records[record.id] = record
        notes = notes_in(metadata)
        if notes.metric_name is not None:
            found.metric_name = notes.metric_name
            found.smaller_is_better = notes.smaller_is_better
    return found


def record_from_metadata(checkpoint: Location, trial: str, metadata: dict[str, Any]) -> CheckpointRecord:
    """Return a checkpoint as retention sees it; values in ``metadata.json`` that make no sense count as missing."""
    notes = notes_in(metadata)
    written = modified(checkpoint / METADATA_FILE)
    time = plausible_time(notes.time_s, written)
    return CheckpointRecord(
        id=checkpoint.name,
        trial=trial,
        steps_completed=notes.steps_completed or 0,
        order=time if time is not None else written or 0.0,
        metric=notes.metric,
    )
