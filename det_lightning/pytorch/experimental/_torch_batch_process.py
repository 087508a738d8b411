"""``torch_batch_process``: every rank processes its share of a dataset, and its progress is checkpointed."""

from __future__ import annotations

import abc
import dataclasses
import json
import math
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sized
from typing import Any

from torch.utils import data

from det_lightning.arguments import require
from det_lightning.core._context import Context, init
from det_lightning.distributed.processes import connect_torchrun_ranks, is_one_of_several
from det_lightning.errors import InvalidCheckpointException
from det_lightning.escaping import get_logger
from det_lightning.pytorch._data import DataLoader
from det_lightning.pytorch._reducer import ReducerRegistry
from det_lightning.pytorch.experimental._batch_context import TorchBatchProcessorContext
from det_lightning.ranks.distributed_context import DistributedContext

logger = get_logger(__name__)

# Determined's names; it reads these checkpoints too.
_STEPS_COMPLETED = "steps_completed"
_OUTPUT_ID = "default_output_uuid"
_RECORDS = "records_per_step"  # of all ranks; Determined ignores this
_FILE = "batch_completed.json"


class TorchBatchProcessor(abc.ABC):
    """The base class of the processors of :func:`torch_batch_process`.

    Args:
        context: device, output directory, reports.

    Example:
        >>> from det_lightning.pytorch.experimental import TorchBatchProcessor, torch_batch_process
        >>> class Largest(TorchBatchProcessor):
        ...     def __init__(self, context):
        ...         self.context = context
        ...         self.largest = 0
        ...     def process_batch(self, batch, batch_idx):
        ...         self.largest = max(self.largest, int(batch.max()))
        ...     def on_checkpoint_start(self):
        ...         with self.context.upload_path() as path:
        ...             _ = (path / "largest.txt").write_text(str(self.largest))
        ...     def on_finish(self):
        ...         print(self.largest)
        >>> torch_batch_process(Largest, [3, 1, 4, 1, 5], batch_size=2, checkpoint_storage="checkpoints")
        5
    """

    @abc.abstractmethod
    def __init__(self, context: TorchBatchProcessorContext) -> None:
        """Load the model."""

    @abc.abstractmethod
    def process_batch(self, batch: Any, batch_idx: int) -> None:
        """Process one batch.

        Args:
            batch: a batch of the loader, not moved to the device.
            batch_idx: index of the batch on this rank, counted from 0 over all runs.
        """

    def on_checkpoint_start(self) -> None:  # noqa: B027 (an event that need not be handled)
        """Save the results of all batches so far: a resumed run continues with the next batch."""

    def on_finish(self) -> None:  # noqa: B027
        """Finish, after all batches of this rank are processed and the metrics are reported."""


def torch_batch_process(
    batch_processor_cls: type[TorchBatchProcessor],
    dataset: data.Dataset[Any],
    batch_size: int | None = None,
    max_batches: int | None = None,
    checkpoint_interval: int = 5,
    dataloader_kwargs: Mapping[str, Any] | None = None,
    distributed_context: DistributedContext | None = None,
    *,
    checkpoint_storage: str | Mapping[str, Any] | None = None,
    latest_checkpoint: str | None = None,
) -> None:
    """Process the batches of a dataset, shared over the ranks, and checkpoint the progress.

    Rank ``r`` of ``n`` processes the batches ``r``, ``r + n``, ... A trial of ``det-lightning run`` that was paused or
    restarted continues after its latest checkpoint. On ``SIGTERM`` a run ends after the next checkpoint.

    Args:
        batch_processor_cls: the class of the processor.
        dataset: a map-style dataset with a length.
        batch_size: records per batch on each rank. Defaults to ``batch_size`` in ``dataloader_kwargs``, else 1.
        max_batches: the maximum number of batches to process on each rank.
        checkpoint_interval: number of batches, on each rank, between checkpoints of the progress.
        dataloader_kwargs: further arguments of ``det_lightning.pytorch.DataLoader``, except for ``shuffle`` and
            samplers.
        distributed_context: the process group. Defaults to torchrun's, else a single process.
        checkpoint_storage: a directory, a URL such as ``s3://bucket/prefix``, or the section of an experiment
            configuration. Defaults to the experiment's storage, else Determined's directory for local runs.
        latest_checkpoint: id, path or URL of a progress checkpoint to continue from. Defaults to the trial's latest
            checkpoint.

    Raises:
        ValueError: arguments cannot be used; all are named. Or the trial has several slots, but only one process. Or
            ``batch_size`` times the number of ranks is not that of the ``latest_checkpoint``.
        TypeError: the dataset has no length.
        InvalidCheckpointException: ``latest_checkpoint`` is not a checkpoint of the progress.
        CheckpointNotFound: ``latest_checkpoint`` does not exist.
        StorageError: the storage cannot be used.

    Example:
        >>> from det_lightning.pytorch.experimental import TorchBatchProcessor, torch_batch_process
        >>> class Total(TorchBatchProcessor):
        ...     def __init__(self, context):
        ...         self.total = 0
        ...     def process_batch(self, batch, batch_idx):
        ...         self.total += int(batch.sum())
        ...     def on_finish(self):
        ...         print(self.total)
        >>> torch_batch_process(Total, list(range(10)), batch_size=4, checkpoint_storage="checkpoints")
        45
    """
    is_processor = isinstance(batch_processor_cls, type) and hasattr(batch_processor_cls, "process_batch")
    require(is_processor, "torch_batch_process()", "a subclass of TorchBatchProcessor", batch_processor_cls)
    options = _loader_options(dataset, batch_size, checkpoint_interval, dataloader_kwargs)
    if distributed_context is None and is_one_of_several():
        distributed_context = connect_torchrun_ranks()
    with init(distributed=distributed_context, checkpoint_storage=checkpoint_storage) as core_context:
        if latest_checkpoint is None and core_context.info is not None:
            latest_checkpoint = core_context.info.latest_checkpoint
        ranks = core_context.distributed
        progress = _Progress.begin(core_context, latest_checkpoint, options["batch_size"] * ranks.size)
        context = TorchBatchProcessorContext(core_context, f"{progress.output_id}/rank_{ranks.rank}")
        processor = batch_processor_cls(context=context)
        loader = DataLoader(dataset, **options)
        batches = loader.get_data_loader(False, progress.steps_completed, ranks.size, ranks.rank)
        records = len(dataset)  # type: ignore[arg-type]
        length = _count_batches(records, options["batch_size"], ranks.size, max_batches)
        if not _process_batches(processor, context, progress, batches, length, checkpoint_interval):
            return
        processor.on_finish()
        if ranks.rank == 0 and context.has_output:
            storage = core_context.checkpoint.storage
            logger.info("The files of upload_path() are in %s.", storage.root / progress.output_id)
        ranks.gather(None)  # all have finished
        if ranks.rank == 0:
            core_context.train.report_progress(1.0)


def _process_batches(
    processor: TorchBatchProcessor,
    context: TorchBatchProcessorContext,
    progress: _Progress,
    batches: Iterable[Any],
    length: int,
    checkpoint_interval: int,
) -> bool:
    """Process the batches of this rank; return whether all are done, rather than the run preempted."""
    steps_completed = progress.steps_completed
    iterator = iter(batches)  # its workers end with this function
    saved_at: int | None = None
    for batch_idx in range(steps_completed, length):
        # A rank may have one batch fewer than others; it still takes part in their exchanges.
        batch = next(iterator, None)
        if batch is not None:
            processor.process_batch(batch=batch, batch_idx=batch_idx)
        steps_completed = batch_idx + 1
        if steps_completed % checkpoint_interval == 0:
            processor.on_checkpoint_start()
            progress.save(steps_completed)
            saved_at = steps_completed
            if progress.is_preempted(steps_completed / length):
                progress.report_metrics(context.reducers, steps_completed)
                return False
    if saved_at != length:
        processor.on_checkpoint_start()
        progress.save(length)
    progress.report_metrics(context.reducers, steps_completed)
    return True


def _loader_options(
    dataset: data.Dataset[Any],
    batch_size: int | None,
    checkpoint_interval: int,
    dataloader_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the arguments of the loader, with ``batch_size``; raise if arguments of ``torch_batch_process`` clash."""
    options = dict(dataloader_kwargs or {})
    mistakes = [
        f"dataloader_kwargs has {name}, and the batches are shared out in the order of the dataset: leave it out"
        for name in ("sampler", "batch_sampler")
        if name in options
    ]
    if options.pop("shuffle", False):
        mistakes.append("dataloader_kwargs has shuffle=True, and a resumed run could not continue: leave it out")
    if batch_size is not None:
        if "batch_size" in options:
            mistakes.append("batch_size is passed twice, as an argument and in dataloader_kwargs: leave one out")
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


def _count_batches(records: int, batch_size: int, ranks: int, max_batches: int | None) -> int:
    """Return the number of batches per rank; a rank may have one batch fewer."""
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
class _Progress:
    """The progress of all ranks. All ranks call the methods together."""

    core_context: Context
    steps_completed: int  # number of batches that each rank has processed in earlier runs
    output_id: str  # name of the output directory
    records_per_step: int  # of all ranks

    @classmethod
    def begin(cls, core_context: Context, latest_checkpoint: str | None, records_per_step: int) -> _Progress:
        """Return the progress in a checkpoint, or of a new run."""
        output_id = core_context.distributed.broadcast(str(uuid.uuid4()))
        if latest_checkpoint is None:
            return cls(core_context, 0, output_id, records_per_step)
        metadata = core_context.checkpoint.get_metadata(latest_checkpoint)
        missing = [name for name in (_STEPS_COMPLETED, _OUTPUT_ID) if name not in metadata]
        if missing:
            raise InvalidCheckpointException(
                f"{latest_checkpoint} is not a checkpoint of torch_batch_process(): the metadata lack "
                f"{' and '.join(missing)}. Load the checkpoint of a model in the processor."
            )
        before = metadata.get(_RECORDS, records_per_step)
        if before != records_per_step:
            raise ValueError(
                f"torch_batch_process() cannot continue from {latest_checkpoint}: batch_size times the number of ranks "
                f"must be {before}, as before; got {records_per_step}."
            )
        logger.info("%d batches were processed before.", metadata[_STEPS_COMPLETED])
        return cls(core_context, metadata[_STEPS_COMPLETED], metadata[_OUTPUT_ID], records_per_step)

    def save(self, steps_completed: int) -> None:
        """Write a checkpoint with the number of batches that each rank has processed."""
        of_ranks = self.core_context.distributed.gather(steps_completed)
        if of_ranks is None:
            return
        completed = min(of_ranks)
        metadata = {_STEPS_COMPLETED: completed, _OUTPUT_ID: self.output_id, _RECORDS: self.records_per_step}
        with self.core_context.checkpoint.store_path(metadata) as (path, _):
            (path / _FILE).write_text(json.dumps({"batch_completed": completed}), encoding="utf-8")

    def is_preempted(self, fraction: float) -> bool:
        """Report the fraction of processed batches; return whether to end the run."""
        if self.core_context.distributed.rank == 0:
            self.core_context.train.report_progress(fraction)
        return self.core_context.preempt.should_preempt()

    def report_metrics(self, reducers: ReducerRegistry, steps_completed: int) -> None:
        """Reduce and report the metrics of all ranks, if any."""
        metrics = reducers.reduce_on_chief(self.core_context.distributed.gather)
        if metrics is not None:
            self.core_context.train.report_validation_metrics(steps_completed, metrics)
