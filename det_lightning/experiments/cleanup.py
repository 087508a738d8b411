"""Deletes checkpoints when an experiment has ended, by the retention rule of its configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from det_lightning import errors
from det_lightning.checkpoint.retention.policy import CheckpointRecord, Retention
from det_lightning.checkpoint.retention.run_claims import delete_unless_used
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.experiments.directory import ExperimentDirectory
from det_lightning.experiments.state import ExperimentState


def delete_checkpoints(directory: ExperimentDirectory, state: ExperimentState) -> Iterator[tuple[int, str]]:
    """Delete what ``save_experiment_best`` and the like do not keep; yield the trial and id of each deleted one.

    Those that live runs have resumed from, such as trials of another experiment, stay.
    """
    retention = Retention.from_config(directory.config()["checkpoint_storage"])
    if retention is None:
        return
    checkpoints = {id_: found for trial in state.trials.values() for id_, found in trial.checkpoints.items()}
    records = [
        CheckpointRecord(id_, str(found.trial_id), found.steps_completed, found.time, state.metric_at(found))
        for id_, found in checkpoints.items()
    ]
    storage = CheckpointStorage(directory.checkpoint_storage())
    for checkpoint_id in retention.choose_to_delete(records, state.smaller_is_better):
        is_gone = True
        # A runner that was killed here may have deleted it already.
        with contextlib.suppress(errors.CheckpointNotFound):
            is_gone = delete_unless_used(storage, checkpoint_id)
        if is_gone:
            yield checkpoints[checkpoint_id].trial_id, checkpoint_id
