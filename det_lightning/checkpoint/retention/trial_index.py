"""The index of a trial: a file next to the checkpoints with what retention needs to know about them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR, METADATA_FILE
from det_lightning.checkpoint.retention.rule import CheckpointRecord
from det_lightning.checkpoint.retention.run_claims import LOCKS_DIR, is_trial_name
from det_lightning.checkpoint.storage.leases import briefly_held
from det_lightning.checkpoint.storage.location import Location, explain_errors
from det_lightning.checkpoint.storage.metadata import modified, notes_in, plausible_time, read_metadata
from det_lightning.escaping import escape
from det_lightning.files.strict_json import read_every_number, to_json

logger = logging.getLogger(__name__)

_INDEX_DIR = "index"


class _Content(NamedTuple):
    """The content of an index file."""

    metric_name: str | None
    smaller_is_better: bool
    records: dict[str, CheckpointRecord]


class TrialIndex:
    """The checkpoints of one trial, in ``<root>/.det_lightning/index/<experiment>/<trial>.json``.

    Several processes may change it, one after another. A damaged file is rebuilt from the metadata of the checkpoints.
    Without ``smaller_is_better``, the metric is the one in the file.
    """

    def __init__(
        self,
        root: Location,
        experiment: str,
        trial: str,
        metric_name: str | None = None,
        smaller_is_better: bool | None = None,
    ) -> None:
        for what, name in (("experiment", experiment), ("trial", trial)):
            if not is_trial_name(name):
                raise ValueError(
                    f"The name of the {what} is used as a file name: letters, digits, '.', '_' and '-', at most 128; "
                    f"got {name!r}."
                )
        self.experiment = experiment
        self.trial = trial
        self._root = root
        self._file = root.bookkeeping(_INDEX_DIR, experiment, f"{trial}.json")
        self._included: dict[str, CheckpointRecord] = {}
        content = self._read()
        self._records = content.records
        if smaller_is_better is None:
            metric_name = content.metric_name
            smaller_is_better = content.smaller_is_better
        self.metric_name = metric_name
        self.smaller_is_better = smaller_is_better

    @property
    def records(self) -> list[CheckpointRecord]:
        """The trial's checkpoints, oldest first."""
        return sorted(self._records.values(), key=lambda record: record.order)

    def experiment_records(self) -> list[CheckpointRecord]:
        """Return the checkpoints of all trials of the experiment."""
        others = [index for index in read_indexes(self._root, self.experiment) if index.trial != self.trial]
        return [*self.records, *(record for index in others for record in index.records)]

    def include(self, record: CheckpointRecord) -> None:
        """Add a checkpoint; it is written to the file with the next change."""
        self._included[record.id] = record
        self._records.setdefault(record.id, record)

    def add(self, record: CheckpointRecord) -> None:
        """Note a complete checkpoint."""
        with self._changing():
            self._records[record.id] = record

    def note_metric(self, steps_completed: int, metric: float) -> bool:
        """Note a validation's metric if the latest checkpoint is at the same batch and has none; return if so."""
        if self._latest_without_metric(steps_completed) is None:
            return False
        with self._changing():
            record = self._latest_without_metric(steps_completed)
            if record is None:
                return False
            self._records[record.id] = dataclasses.replace(record, metric=metric)
        return True

    def _latest_without_metric(self, steps_completed: int) -> CheckpointRecord | None:
        latest = self.records[-1] if self._records else None
        if latest is None or latest.steps_completed != steps_completed or latest.metric is not None:
            return None
        return latest

    def remove(self, checkpoint_ids: list[str]) -> None:
        """Forget checkpoints."""
        with self._changing():
            for checkpoint_id in checkpoint_ids:
                self._included.pop(checkpoint_id, None)
                self._records.pop(checkpoint_id, None)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Read what other processes wrote, and write the file after the block has changed the records."""
        digest = hashlib.sha256(self._file.path.encode()).hexdigest()[:32]
        lock = self._root.bookkeeping(LOCKS_DIR) / f"{digest}.json"
        with explain_errors("writing", self._file), briefly_held(lock):
            self._records = {**self._included, **self._read().records}
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
        if self._file.is_local:  # runs that were killed right here left these
            for unfinished in self._file.local_path.parent.glob(f".{self._file.name}.*.tmp"):
                unfinished.unlink(missing_ok=True)
        self._file.write(to_json(content, indent=1).encode("utf-8"))

    def _read(self) -> _Content:
        with explain_errors("reading", self._file):
            try:
                return _parse(self._file.read())
            except (FileNotFoundError, NotADirectoryError):
                return _Content(None, True, {})
            except (ValueError, TypeError, KeyError, RecursionError) as e:
                reason = f"{escape(e):.200}"
                logger.warning("The index %s is damaged (%s). It is rebuilt from the checkpoints.", self._file, reason)
        with explain_errors("reading", self._root):
            return self._rebuild()

    def _rebuild(self) -> _Content:
        records = {}
        metric_name = None
        smaller_is_better = True
        for checkpoint in (self._root / name for name in self._root.list_names() if name != BOOKKEEPING_DIR):
            metadata = read_metadata(checkpoint)
            notes = notes_in(metadata)
            if (notes.experiment, notes.trial) == (self.experiment, self.trial):
                written = modified(checkpoint / METADATA_FILE)
                records[checkpoint.name] = record_from_metadata(checkpoint.name, self.trial, metadata, written)
                if notes.metric_name is not None:
                    metric_name = notes.metric_name
                    smaller_is_better = notes.smaller_is_better
        return _Content(metric_name, smaller_is_better, records)


def read_indexes(root: Location, experiment: str | None = None) -> list[TrialIndex]:
    """Return the indexes of all trials in a storage, or of those of one experiment."""
    with explain_errors("reading the index in", root):
        folder = root.bookkeeping(_INDEX_DIR)
        names = [name for name in (folder.list_names() if experiment is None else [experiment]) if is_trial_name(name)]
        files = [(name, file) for name in names for file in (folder / name).list_names() if file.endswith(".json")]
        trials = [(name, file.removesuffix(".json")) for name, file in files]
        return [TrialIndex(root, name, trial) for name, trial in trials if is_trial_name(trial)]


def _parse(content: bytes) -> _Content:
    parsed = json.loads(content)
    if not isinstance(parsed, dict):
        raise TypeError("it does not hold an object")
    records = [_checked(CheckpointRecord(**entry)) for entry in read_every_number(parsed["checkpoints"])]
    metric_name = parsed.get("metric")
    return _Content(
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


def record_from_metadata(
    checkpoint_id: str, trial: str, metadata: dict[str, Any], written: float | None
) -> CheckpointRecord:
    """Return the record of a checkpoint whose ``metadata.json`` dates from ``written``; leave out impossible values."""
    notes = notes_in(metadata)
    time = plausible_time(notes.time_s, written)
    return CheckpointRecord(
        id=checkpoint_id,
        trial=trial,
        steps_completed=notes.steps_completed or 0,
        order=time if time is not None else written or 0.0,
        metric=notes.metric,
    )
