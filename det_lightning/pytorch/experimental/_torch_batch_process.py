"""``torch_batch_process``: every rank processes its share of a dataset, and its progress is checkpointed."""

from __future__ import annotations

import abc
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils import data

from det_lightning.core._context import init
from det_lightning.core._distributed import DistributedContext
from det_lightning.distributed.processes import is_one_of_several, torchrun_context
from det_lightning.pytorch._data import DataLoader
from det_lightning.pytorch.experimental._batch_context import TorchBatchProcessorContext
from det_lightning.pytorch.experimental._batch_progress import BatchProgress, batches_of_each_rank, loader_options

logger = logging.getLogger(__name__)


class TorchBatchProcessor(abc.ABC):
    """What :func:`torch_batch_process` does with each batch.

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
            batch: a batch as the loader yields it, not moved to the device.
            batch_idx: index of the batch on this rank, counted from 0 over all runs.
        """

    def on_checkpoint_start(self) -> None:  # noqa: B027 (an event that need not be handled)
        """Save what was computed: a resumed run continues after the batches processed so far."""

    def on_finish(self) -> None:  # noqa: B027
        """Finish, once all batches of this rank are processed and the metrics are reported."""


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
    """Give the batches of a dataset to a processor, to each rank its share, and checkpoint the progress.

    Rank ``r`` of ``n`` processes the batches ``r``, ``r + n``, ... A trial of ``det-lightning run`` that was paused or
    restarted continues after its latest checkpoint. On ``SIGTERM`` a run ends after the next checkpoint.

    Args:
        batch_processor_cls: the class of the processor.
        dataset: a map-style dataset with a length.
        batch_size: records per batch on each rank; by default the one in ``dataloader_kwargs``, otherwise 1.
        max_batches: the maximum number of batches to process on each rank.
        checkpoint_interval: number of batches, on each rank, between checkpoints of the progress.
        dataloader_kwargs: further arguments of ``det_lightning.pytorch.DataLoader``, except those that determine the
            order of the data.
        distributed_context: the processes; by default those of torchrun if it started the script, otherwise this one
            alone.
        checkpoint_storage: a directory, a URL such as ``s3://bucket/prefix``, or the section of an experiment
            configuration. By default the experiment's storage, or outside of one the directory that Determined uses
            for local runs.
        latest_checkpoint: id, path or URL of a progress checkpoint to continue from; by default the trial's latest
            checkpoint.

    Raises:
        ValueError: arguments cannot be used; all are named. Or the trial has several slots, but only one process.
        TypeError: the dataset has no length.
        InvalidCheckpointException: ``latest_checkpoint`` is not a checkpoint of the progress.
        CheckpointNotFound: it does not exist.
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
    options = loader_options(dataset, batch_size, checkpoint_interval, dataloader_kwargs)
    if distributed_context is None and is_one_of_several():
        distributed_context = torchrun_context()
    with init(distributed=distributed_context, checkpoint_storage=checkpoint_storage) as core_context:
        if latest_checkpoint is None and core_context.info is not None:
            latest_checkpoint = core_context.info.latest_checkpoint
        progress = BatchProgress.begin(core_context, latest_checkpoint)
        ranks = core_context.distributed
        context = TorchBatchProcessorContext(core_context, f"{progress.output_id}/rank_{ranks.rank}")
        processor = batch_processor_cls(context=context)
        loader = DataLoader(dataset, **options)
        batches = iter(loader.get_data_loader(False, progress.steps_completed, ranks.size, ranks.rank))
        records = len(dataset)  # type: ignore[arg-type]
        length = batches_of_each_rank(records, options["batch_size"], ranks.size, max_batches)
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
    progress: BatchProgress,
    batches: Iterator[Any],
    length: int,
    checkpoint_interval: int,
) -> bool:
    """Process the batches of this rank; return whether all are done, rather than the run preempted."""
    steps_completed = progress.steps_completed
    saved_at: int | None = None
    for batch_idx in range(steps_completed, length):
        # A rank may have one batch fewer than others; it still takes part in their exchanges.
        batch = next(batches, None)
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
