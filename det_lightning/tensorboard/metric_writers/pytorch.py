"""A TensorBoard writer for trials, at its old path."""

from __future__ import annotations

import warnings

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from det_lightning.core._tensorboard import TensorBoardOutput


class TorchWriter:
    """Writes TensorBoard files beside those of the run. Deprecated: use ``context.get_tensorboard_writer()``.

    Attributes:
        writer: a ``torch.utils.tensorboard.SummaryWriter``.
    """

    def __init__(self) -> None:
        warnings.warn(
            "TorchWriter is deprecated; use the writer that context.get_tensorboard_writer() returns.",
            FutureWarning,
            stacklevel=2,
        )
        self.writer: SummaryWriter = TensorBoardOutput(enabled=True).writer

    def add_scalar(self, name: str, value: int | float | np.number, step: int) -> None:
        """Write one value."""
        self.writer.add_scalar(name, value, step)

    def reset(self) -> None:
        """Close the present file; the next value begins another."""
        self.writer.close()

    def flush(self) -> None:
        """Write out what is buffered."""
        self.writer.flush()
