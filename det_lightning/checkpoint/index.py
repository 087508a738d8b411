"""A small record of the checkpoints of a trial, kept beside them: what retention needs to know and no file tells."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.location import Location, explain_errors
from det_lightning.checkpoint.paths import bookkeeping_path
from det_lightning.checkpoint.retention import CheckpointRecord

__all__ = ["TrialIndex", "read_indexes"]

logger = logging.getLogger("det_lightning.checkpoint")

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def _index_dir(root: Location) -> Location:
    return bookkeeping_path(root, "index")


class TrialIndex:
    """The checkpoints of one trial, in ``<root>/.det_lightning/index/<experiment>/<trial>.json``.

    Only one process at a time may write the index of a trial.

    Args:
        root: of the storage.
        experiment: name of the experiment that the trial belongs to.
        trial: name of the trial.
        metric_name: name of the searcher metric.
        smaller_is_better: whether a smaller value of it is an improvement.

    Raises:
        ValueError: a name can not be the name of a file.
        StorageError: the index can not be read.
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
            if not _NAME.fullmatch(name) or name.startswith("."):
                raise ValueError(
                    f"The name of the {what} becomes that of a file: letters, digits, '.', '_' and '-', at most 128; "
                    f"got {name!r}."
                )
        self.experiment = experiment
        self.trial = trial
        self.metric_name = metric_name
        self.smaller_is_better = smaller_is_better
        self._root = root
        self._file = bookkeeping_path(root, "index", experiment, f"{trial}.json")
        self._records = {record.id: record for record in _read(self._file)}

    @property
    def records(self) -> list[CheckpointRecord]:
        """The trial's checkpoints, the oldest first."""
        return sorted(self._records.values(), key=lambda record: record.order)

    def experiment_records(self) -> list[CheckpointRecord]:
        """Return the checkpoints of all trials of the experiment."""
        others = [index for index in read_indexes(self._root, self.experiment) if index.trial != self.trial]
        return [*self.records, *(record for index in others for record in index.records)]

    def include(self, record: CheckpointRecord) -> None:
        """Take a checkpoint into account, without writing it down."""
        self._records.setdefault(record.id, record)

    def add(self, record: CheckpointRecord) -> None:
        """Note a complete checkpoint."""
        self._records[record.id] = record
        self._write()

    def note_metric(self, steps_completed: int, metric: float) -> bool:
        """Note the metric of a validation for the latest checkpoint, if it was written at the same batch.

        Returns:
            Whether it was.
        """
        latest = self.records[-1:]
        for record in latest:
            if record.steps_completed == steps_completed and record.metric is None:
                self._records[record.id] = dataclasses.replace(record, metric=metric)
                self._write()
                return True
        return False

    def remove(self, checkpoint_ids: list[str]) -> None:
        """Forget checkpoints."""
        for checkpoint_id in checkpoint_ids:
            self._records.pop(checkpoint_id, None)
        self._write()

    def _write(self) -> None:
        content = {
            "experiment": self.experiment,
            "trial": self.trial,
            "metric": self.metric_name,
            "smaller_is_better": self.smaller_is_better,
            "checkpoints": [dataclasses.asdict(record) for record in self.records],
        }
        with explain_errors(f"writing {self._file}"):
            if self._file.is_local:  # what this trial's earlier runs left that were killed right here
                for unfinished in self._file.local_path.parent.glob(f".{self._file.name}.*.tmp"):
                    unfinished.unlink(missing_ok=True)
            self._file.write(json.dumps(content, indent=1).encode("utf-8"))


def read_indexes(root: Location, experiment: str | None = None) -> list[TrialIndex]:
    """Return the indexes of all trials in a storage, or of those of one experiment.

    Raises:
        StorageError: the storage can not be read.
    """
    with explain_errors(f"reading the index in {root}"):
        experiments = _index_dir(root).list_names() if experiment is None else [experiment]
        found = []
        for name in experiments:
            folder = _index_dir(root) / name
            for file in folder.list_names():
                if file.endswith(".json"):
                    found.append(_read_whole(root, name, file.removesuffix(".json")))
    return found


def _read_whole(root: Location, experiment: str, trial: str) -> TrialIndex:
    index = TrialIndex(root, experiment, trial)
    content = _parse(_index_dir(root) / experiment / f"{trial}.json")
    index.metric_name = content.get("metric")
    index.smaller_is_better = bool(content.get("smaller_is_better", True))
    return index


def _read(file: Location) -> list[CheckpointRecord]:
    entries = _parse(file).get("checkpoints", [])
    try:
        return [_checked(CheckpointRecord(**entry)) for entry in entries]
    except TypeError as e:
        raise errors.StorageError(f"The index {file} is damaged: {e}. Remove it to begin a new one.") from e


def _checked(record: CheckpointRecord) -> CheckpointRecord:
    numbers = [record.steps_completed, record.order, 0.0 if record.metric is None else record.metric]
    if not all(isinstance(name, str) for name in (record.id, record.trial)) or not all(
        isinstance(number, int | float) for number in numbers
    ):
        raise TypeError(f"an entry is {record!r:.200}")
    return record


def _parse(file: Location) -> dict[str, Any]:
    with explain_errors(f"reading {file}"):
        if not file.exists():
            return {}
        content = file.read()
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as e:
        raise errors.StorageError(f"The index {file} is damaged: {e}. Remove it to begin a new one.") from e
    if not isinstance(parsed, dict):
        raise errors.StorageError(f"The index {file} is damaged: it holds no object. Remove it to begin a new one.")
    return parsed
