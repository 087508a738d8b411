"""How far the ranks of a batch inference have come: checkpoints, metrics, preemption."""

from __future__ import annotations

import dataclasses
import json
import logging
import uuid

from det_lightning.core._context import Context
from det_lightning.errors import InvalidCheckpointException
from det_lightning.pytorch._reducer import ReducerRegistry

logger = logging.getLogger(__name__)

# Determined's names; it reads these checkpoints too.
_STEPS_COMPLETED = "steps_completed"
_OUTPUT_ID = "default_output_uuid"
_FILE = "batch_completed.json"


@dataclasses.dataclass(frozen=True)
class BatchProgress:
    """The progress of all ranks."""

    core_context: Context
    steps_completed: int  # number of batches that each rank has processed in earlier runs
    output_id: str  # name of the output directory

    @classmethod
    def begin(cls, core_context: Context, latest_checkpoint: str | None) -> BatchProgress:
        """Return the progress in a checkpoint, or of a new run; all ranks call this.

        Raises:
            InvalidCheckpointException: the checkpoint does not hold the progress of a batch inference.
            CheckpointNotFound, StorageError: it cannot be read.
        """
        output_id = core_context.distributed.broadcast(str(uuid.uuid4()))
        if latest_checkpoint is None:
            return cls(core_context, 0, output_id)
        metadata = core_context.checkpoint.get_metadata(latest_checkpoint)
        missing = [name for name in (_STEPS_COMPLETED, _OUTPUT_ID) if name not in metadata]
        if missing:
            raise InvalidCheckpointException(
                f"{latest_checkpoint} is not a checkpoint of torch_batch_process(): its metadata lack "
                f"{' and '.join(missing)}. It goes on from its own checkpoints only; load a model's in the processor."
            )
        logger.info("%d batches were processed before.", metadata[_STEPS_COMPLETED])
        return cls(core_context, metadata[_STEPS_COMPLETED], metadata[_OUTPUT_ID])

    def save(self, steps_completed: int) -> None:
        """Write a checkpoint with the number of batches that each rank has processed; all ranks call this."""
        of_ranks = self.core_context.distributed.gather(steps_completed)
        if of_ranks is None:
            return
        completed = min(of_ranks)
        metadata = {_STEPS_COMPLETED: completed, _OUTPUT_ID: self.output_id}
        with self.core_context.checkpoint.store_path(metadata) as (path, _):
            (path / _FILE).write_text(json.dumps({"batch_completed": completed}), encoding="utf-8")

    def is_preempted(self, fraction: float) -> bool:
        """Report the fraction of batches processed; return whether the run is to end. All ranks call this."""
        if self.core_context.distributed.rank == 0:
            self.core_context.train.report_progress(fraction)
        return self.core_context.preempt.should_preempt()

    def report_metrics(self, reducers: ReducerRegistry, steps_completed: int) -> None:
        """Reduce and report the metrics of all ranks, if there are any; all ranks call this."""
        metrics = reducers.reduce_on_chief(self.core_context.distributed.gather)
        if metrics is not None:
            self.core_context.train.report_validation_metrics(steps_completed, metrics)
