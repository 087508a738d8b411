"""Batch inference: running a model over a dataset, in several processes, with checkpoints of the progress."""

from det_lightning.pytorch.experimental._batch_context import TorchBatchProcessorContext, get_default_device
from det_lightning.pytorch.experimental._torch_batch_process import TorchBatchProcessor, torch_batch_process

__all__ = ["TorchBatchProcessor", "TorchBatchProcessorContext", "get_default_device", "torch_batch_process"]
