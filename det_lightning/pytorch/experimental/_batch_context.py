"""The context of a batch processor: device, reducers, an output directory, reports."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from det_lightning.checkpoint.storage.location import upload
from det_lightning.core._context import Context
from det_lightning.core._shards import list_files, select_files
from det_lightning.core._with_statement import for_with_statement
from det_lightning.distributed.processes import select_device
from det_lightning.pytorch._data import to_device
from det_lightning.pytorch._reducer import ReducerMethods, ReducerRegistry


def get_default_device(core_context: Context) -> torch.device:
    """Return the device of this rank: the GPU with its local rank as the index, or the CPU if there is no GPU.

    Raises:
        ValueError: there are more ranks on this machine than GPUs.

    Example:
        >>> import det_lightning as det
        >>> from det_lightning.pytorch.experimental import get_default_device
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     get_default_device(core_context).type in ("cpu", "cuda")
        True
    """
    return select_device(core_context.distributed.local_rank)


class TorchBatchProcessorContext(ReducerMethods):
    """Passed to the ``__init__`` of a :class:`TorchBatchProcessor`; created by :func:`torch_batch_process`.

    Attributes:
        device: the device of batches and models.
        distributed: rank and size.
        reducers: the wrapped metrics.

    Example:
        >>> import torch
        >>> from det_lightning.pytorch.experimental import TorchBatchProcessor, torch_batch_process
        >>> class Predicting(TorchBatchProcessor):
        ...     def __init__(self, context):
        ...         self.context = context
        ...         self.model = context.prepare_model_for_inference(torch.nn.Linear(2, 1))
        ...     def process_batch(self, batch, batch_idx):
        ...         with torch.inference_mode(), self.context.upload_path() as path:
        ...             predicted = self.model(self.context.to_device(batch))
        ...             print(tuple(predicted.shape))
        ...             torch.save(predicted, path / f"{batch_idx}.pt")
        >>> torch_batch_process(Predicting, torch.ones(6, 2), batch_size=4, checkpoint_storage="checkpoints")
        (4, 1)
        (2, 1)
    """

    def __init__(self, core_context: Context, storage_path: str) -> None:
        self._core_context = core_context
        self._output = core_context.checkpoint.storage.root / storage_path
        self._warned_types: set[type] = set()
        self.has_output = False
        self.device = get_default_device(core_context)
        self.distributed = core_context.distributed
        self.reducers = ReducerRegistry(self.distributed.allgather, self.distributed.size, self.device)

    def report_metrics(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Report metrics of any group; see :meth:`det_lightning.core.TrainContext.report_metrics`."""
        self._core_context.train.report_metrics(group, steps_completed, metrics)

    def get_tensorboard_path(self) -> pathlib.Path:
        """Return the directory of the run's TensorBoard files."""
        return self._core_context.train.get_tensorboard_path()

    def report_task_using_model_version(self, model_version: Any) -> None:
        """Log that the script uses a version of a model."""
        self._core_context.experimental.report_task_using_model_version(model_version)

    def report_task_using_checkpoint(self, checkpoint: Any) -> None:
        """Log that the script uses a checkpoint."""
        self._core_context.experimental.report_task_using_checkpoint(checkpoint)

    def get_distributed_rank(self) -> int:
        """Return the index of this process among all."""
        return self.distributed.get_rank()

    def get_distributed_size(self) -> int:
        """Return the number of processes."""
        return self.distributed.get_size()

    def get_hparams(self) -> dict[str, Any]:
        """Return the hyperparameters of the trial; raise a ValueError if the script runs alone."""
        info = self._core_context.info
        if info is None:
            raise ValueError("There are no hyperparameters without a configuration: use `det-lightning run CONFIG`.")
        return info.trial.hparams

    def to_device(self, data: Any, warned_types: set[type] | None = None) -> Any:
        """Move data to the device; see :func:`det_lightning.pytorch.to_device`."""
        return to_device(data, self.device, self._warned_types if warned_types is None else warned_types)

    def prepare_model_for_inference(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a model in evaluation mode, on the device."""
        return model.eval().to(self.device)

    @for_with_statement("with context.upload_path() as directory")
    def upload_path(self) -> Iterator[pathlib.Path]:
        """Write output in a ``with`` block: files saved in the directory end up in the checkpoint storage.

        All blocks of a rank write to one directory of the storage, ``ID/rank_RANK``, even in resumed runs.

        Yields:
            The directory. For remote storage an empty directory; the files are uploaded when the block ends.

        Raises:
            StorageError: the storage refuses.
        """
        self.has_output = True
        if self._output.is_local:
            self._output.local_path.mkdir(parents=True, exist_ok=True)
            yield self._output.local_path
            return
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory)
            yield path
            upload(path, select_files(list_files(path)), self._output)
