"""The checkpoints of a trial: read from the storage once, then kept in memory; deleting those that no rule keeps.

Earlier releases kept an index of each trial, with metrics found nowhere else. These metrics move to the metadata of the
checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import METADATA_FILE
from det_lightning.checkpoint.retention.policy import CheckpointPolicy, CheckpointRecord
from det_lightning.checkpoint.retention.run_claims import delete_unless_used
from det_lightning.checkpoint.storage.ancestry import RUN_KEY
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.claims import remove_if_empty
from det_lightning.checkpoint.storage.location import Location, explain_errors, is_name
from det_lightning.checkpoint.storage.metadata import (
    CheckpointInfo,
    call_in_parallel,
    glance,
    plausible_time,
    read_notes,
)
from det_lightning.checkpoint.storage.survey import add_entries
from det_lightning.escaping import get_logger
from det_lightning.files.strict_json import as_number, read_every_number

logger = get_logger(__name__)

#: The directory of the indexes of earlier releases.
_INDEX_DIR = "index"


def make_record(info: CheckpointInfo, trial: str, metric_name: str | None = None) -> CheckpointRecord:
    """Return a checkpoint's record for the rule; with ``metric_name``, any other metric does not count."""
    notes = read_notes(info.metadata)
    # The times of a trial's own runs grow from one checkpoint to the next, whatever its clock has done meanwhile.
    time_s = plausible_time(notes.time_s, None if RUN_KEY in info.metadata else info.metadata_written)
    counts = metric_name is None or notes.metric_name in (None, metric_name)
    return CheckpointRecord(
        id=info.id,
        trial=trial,
        steps_completed=notes.steps_completed or 0,
        order=time_s if time_s is not None else info.metadata_written or 0.0,
        metric=notes.metric if counts else None,
    )


class TrialCheckpoints:
    """The checkpoints of the trial that a run has claimed; no other run adds any or deletes any.

    ``run_id`` is the id of the run, which may itself have resumed from one of the checkpoints. ``on_delete`` gets the
    id of each checkpoint that the rule has deleted.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        policy: CheckpointPolicy,
        trial: str,
        run_id: str,
        on_delete: Callable[[str], None] | None = None,
    ) -> None:
        self._storage = storage
        self._policy = policy
        self._trial = trial
        self._run_id = run_id
        self._on_delete = on_delete
        self._records: dict[str, CheckpointRecord] = {}
        self._resumed_from: str | None = None
        self._latest = 0.0  # the order of the latest checkpoint
        self._written: list[str] = []  # by this run, and not deleted
        self._vanished: list[str] = []

    def learn(self, experiment: str, resumed_from: str | None = None) -> None:
        """Find the checkpoints of earlier runs; nothing is deleted before this run has written a checkpoint.

        ``resumed_from`` is the id of the checkpoint that the run resumes from.
        """
        storage = self._storage
        storage.retry.call("reading", lambda: move_metrics(storage, experiment, self._trial), where=storage.root)
        found = storage.retry.call("reading", storage.glance, where=storage.root)
        notes = [read_notes(info.metadata) for info in found]
        names = (experiment, self._trial)
        own = [info for info, one in zip(found, notes, strict=True) if (one.experiment, one.trial) == names]
        if storage.root.is_object_store:  # whose index may have been written before the metric was
            old = [storage.root / info.id for info in own if "metric" not in info.metadata]
            read = storage.retry.call(
                "reading", lambda: call_in_parallel(storage.root, glance, old), where=storage.root
            )
            own = [info for info in own if "metric" in info.metadata] + [info for info in read if info is not None]
        self._records = {info.id: make_record(info, self._trial, self._policy.metric) for info in own}
        self._latest = max((record.order for record in self._records.values()), default=0.0)
        self._resumed_from = resumed_from

    def next_order(self) -> float:
        """Return the time of the next checkpoint, in seconds since 1970, which grows even if the clock is set back."""
        return max(time.time(), self._latest + 1e-3)

    def add(self, checkpoint_id: str, steps_completed: int, order: float, metric: float | None) -> None:
        """Note a complete checkpoint, then delete checkpoints that need not be kept any longer."""
        record = CheckpointRecord(checkpoint_id, self._trial, steps_completed, order, metric)
        self._records[checkpoint_id] = record
        self._latest = order
        self._written.append(checkpoint_id)
        if self._policy.retention is not None:
            self._delete_the_rest()

    def note_metric(self, steps_completed: int, metric: float) -> None:
        """Note the metric of a validation if the latest checkpoint of this run is at the same batch without a metric.

        Before the run has written a checkpoint, the checkpoint that the run resumed from counts as the latest.
        """
        latest = max(self._records.values(), key=lambda record: record.order, default=None)
        if latest is None or latest.steps_completed != steps_completed or latest.metric is not None:
            return
        if latest.id not in (*self._written, self._resumed_from):
            return
        try:
            is_noted = add_metric(self._storage, latest.id, self.describe_metric(metric))
        except errors.StorageError as e:
            logger.warning("The metric of checkpoint %s cannot be written into the metadata: %s", latest.id, e)
            return
        if is_noted:
            self._records[latest.id] = dataclasses.replace(latest, metric=metric)
            if self._written:
                self._delete_the_rest()

    def describe_metric(self, value: float) -> dict[str, Any]:
        """Return the entry of ``metadata.json`` for the value of the policy's metric."""
        policy = self._policy
        return {"name": policy.metric, "value": value, "smaller_is_better": policy.smaller_is_better}

    def _delete_the_rest(self) -> None:
        own_run = self._run_id if self._written else None  # what it resumed from stays until it has written one
        for checkpoint_id in self._policy.choose_to_delete(self._records.values()):
            try:
                if not delete_unless_used(self._storage, checkpoint_id, own_run):
                    logger.info("Checkpoint %s is kept while another run resumes from the checkpoint.", checkpoint_id)
                    continue
            except errors.CheckpointNotFound:
                logger.warning("Checkpoint %s was deleted by another process.", checkpoint_id)
            except errors.StorageError as e:
                # The new checkpoint is safe, and training must not fail because an old one could not be deleted.
                logger.warning("An old checkpoint cannot be deleted; the next save tries again: %s", e)
                continue
            self._forget([checkpoint_id])
            if self._on_delete is not None:
                self._on_delete(checkpoint_id)

    def _forget(self, checkpoint_ids: Sequence[str]) -> None:
        for checkpoint_id in checkpoint_ids:
            self._records.pop(checkpoint_id, None)
        self._written = [checkpoint_id for checkpoint_id in self._written if checkpoint_id not in checkpoint_ids]

    def report_vanished(self) -> None:
        """Log an error that names the vanished checkpoints of this run; training goes on."""
        if self._written and (gone := self._find_vanished()):
            self._forget(gone)
            self._vanished += gone
            logger.error("%s", self._describe_vanished(gone))

    def _find_vanished(self) -> list[str]:
        """Return the ids of this run's checkpoints that no longer exist, or have been replaced by links.

        A remote storage is listed once to find existing checkpoints; only the last is checked to be complete.
        """
        root = self._storage.root
        call = self._storage.retry.call
        if not root.is_local:
            last = root / self._written[-1]
            names = {*call("looking for checkpoints in", root.list_names, where=root)}
            if not call("looking for checkpoints in", (last / METADATA_FILE).exists, where=root):
                names.discard(last.name)
            return [name for name in self._written if name not in names]
        gone = []
        with explain_errors("looking for checkpoints in", root):
            for folder in map(root.local_path.joinpath, self._written):
                if folder.is_symlink() or not (folder / METADATA_FILE).exists():
                    gone.append(folder.name)
        return gone

    def finish(self) -> None:
        """End the run: delete unneeded checkpoints, and raise a ``StorageError`` that names vanished checkpoints."""
        self._delete_the_rest()
        self.report_vanished()
        if self._vanished:
            raise errors.StorageError(self._describe_vanished(self._vanished))

    def _describe_vanished(self, checkpoint_ids: list[str]) -> str:
        return (
            f"{len(checkpoint_ids)} checkpoints that this run has written to {self._storage} no longer exist: "
            f"{', '.join(checkpoint_ids)}. Was the storage removed or unmounted, or were the checkpoints deleted by "
            "hand? Retention deletes old checkpoints of this trial, and `det-lightning checkpoint prune` those of "
            "earlier runs."
        )


def with_metrics(root: Location, infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return the facts about checkpoints of a storage, with the metrics that only the old indexes have."""
    with explain_errors("reading the index in", root):
        folder = root.bookkeeping(_INDEX_DIR)
        experiments = [folder / name for name in folder.list_names() if is_name(name)]
        files = [one / name for one in experiments for name in one.list_names() if name.endswith(".json")]
        metrics = {checkpoint_id: metric for file in files for checkpoint_id, metric in _read(file).items()}
    return [
        dataclasses.replace(info, metadata={**info.metadata, "metric": metrics[info.id]})
        if info.id in metrics and "metric" not in info.metadata
        else info
        for info in infos
    ]


def move_metrics(storage: CheckpointStorage, experiment: str, trial: str) -> None:
    """Write the metrics in the index of a trial into the metadata of the checkpoints, and remove the index."""
    if not (is_name(experiment) and is_name(trial)):
        return  # such a trial had no index
    file = storage.root.bookkeeping(_INDEX_DIR, experiment, f"{trial}.json")
    with explain_errors("reading", file):
        if not file.exists():
            return
        metrics = _read(file)
    for checkpoint_id, metric in metrics.items():
        if is_name(checkpoint_id):
            add_metric(storage, checkpoint_id, metric)
    storage.retry.call("removing", file.remove, where=file)
    if file.is_local:
        remove_if_empty(file.local_path.parent)


def add_metric(storage: CheckpointStorage, checkpoint_id: str, metric: Mapping[str, Any]) -> bool:
    """Add a metric to a checkpoint's metadata; return False if the metadata are gone, damaged, or have a metric."""
    write = functools.partial(add_entries, storage.root, checkpoint_id, {"metric": dict(metric)})
    return storage.retry.call("writing the metadata of", write, where=checkpoint_id)


def _read(file: Location) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(file.read())
        entries = read_every_number(content["checkpoints"])
        values = {str(entry["id"]): as_number(entry.get("metric")) for entry in entries}
        rest = {"name": content.get("metric"), "smaller_is_better": content.get("smaller_is_better") is not False}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        logger.warning("The old index %s is damaged, and is not used: %s", file, f"{e!s:.200}")
        return {}
    return {name: {**rest, "value": value} for name, value in values.items() if value is not None}
