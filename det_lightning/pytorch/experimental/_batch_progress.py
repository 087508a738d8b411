"""Which batches of a dataset a rank processes; how far the ranks have come: checkpoints, metrics, preemption."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import uuid
import warnings
from collections.abc import Mapping, Sized
from typing import Any

from torch.utils import data

from det_lightning.core._context import Context
from det_lightning.errors import InvalidCheckpointException
from det_lightning.pytorch._reducer import ReducerRegistry

logger = logging.getLogger(__name__)

# Determined's names; it reads these checkpoints too.
_STEPS_COMPLETED = "steps_completed"
_OUTPUT_ID = "default_output_uuid"
_FILE = "batch_completed.json"


def loader_options(
    dataset: data.Dataset[Any],
    batch_size: int | None,
    checkpoint_interval: int,
    dataloader_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the arguments of the loader, with ``batch_size``; raise if those of ``torch_batch_process`` are wrong."""
    options = dict(dataloader_kwargs or {})
    mistakes = [
        f"dataloader_kwargs has {name}, and the batches are shared out in the order of the dataset: leave it out"
        for name in ("sampler", "batch_sampler")
        if name in options
    ]
    if options.pop("shuffle", False):
        mistakes.append("dataloader_kwargs has shuffle=True, and a resumed run could not go on: leave it out")
    if batch_size is not None:
        if "batch_size" in options:
            mistakes.append("batch_size is given twice, as an argument and in dataloader_kwargs: leave one out")
        options["batch_size"] = batch_size
    size = options.setdefault("batch_size", 1)
    counts = {"batch_size": size, "checkpoint_interval": checkpoint_interval}
    mistakes += [f"{name} must be at least 1; got {value!r}" for name, value in counts.items() if value < 1]
    if mistakes:
        raise ValueError(f"torch_batch_process() cannot use its arguments: {'; '.join(mistakes)}.")
    if not isinstance(dataset, Sized):
        raise TypeError(
            f"torch_batch_process() takes a dataset with a length; {type(dataset).__name__} has no __len__()."
        )
    return options


def batches_of_each_rank(records: int, batch_size: int, ranks: int, max_batches: int | None) -> int:
    """Return the number of batches that each rank processes; some may have one fewer."""
    length = math.ceil(records / batch_size / ranks)
    if max_batches is None:
        return length
    if 0 < max_batches <= length:
        return max_batches
    warnings.warn(
        f"max_batches={max_batches} has no effect: each rank processes all its {length} batches.", stacklevel=2
    )
    return length


@dataclasses.dataclass(frozen=True)
class BatchProgress:
    """The progress of all ranks. All of them call its methods together."""

    core_context: Context
    steps_completed: int  # number of batches that each rank has processed in earlier runs
    output_id: str  # name of the output directory

    @classmethod
    def begin(cls, core_context: Context, latest_checkpoint: str | None) -> BatchProgress:
        """Return the progress in a checkpoint, or of a new run."""
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
        """Write a checkpoint with the number of batches that each rank has processed."""
        of_ranks = self.core_context.distributed.gather(steps_completed)
        if of_ranks is None:
            return
        completed = min(of_ranks)
        metadata = {_STEPS_COMPLETED: completed, _OUTPUT_ID: self.output_id}
        with self.core_context.checkpoint.store_path(metadata) as (path, _):
            (path / _FILE).write_text(json.dumps({"batch_completed": completed}), encoding="utf-8")

    def is_preempted(self, fraction: float) -> bool:
        """Report the fraction of batches processed; return whether the run is to end."""
        if self.core_context.distributed.rank == 0:
            self.core_context.train.report_progress(fraction)
        return self.core_context.preempt.should_preempt()

    def report_metrics(self, reducers: ReducerRegistry, steps_completed: int) -> None:
        """Reduce and report the metrics of all ranks, if there are any."""
        metrics = reducers.reduce_on_chief(self.core_context.distributed.gather)
        if metrics is not None:
            self.core_context.train.report_validation_metrics(steps_completed, metrics)
