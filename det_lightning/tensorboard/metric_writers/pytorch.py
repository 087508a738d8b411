"""``TorchWriter``: a TensorBoard writer for trials, at an old path of Determined."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from det_lightning.core._task import current_task, default_directory, latest_run
from det_lightning.core._tensorboard import TensorBoardOutput

__all__ = ["TorchWriter"]


class TorchWriter:
    """Writes into the TensorBoard files of the run. Deprecated: use ``context.get_tensorboard_writer()``.

    The run is the latest of this process, from a context or ``core.init()``; without a run the files go to a new
    directory.
    """

    def __init__(self) -> None:
        warnings.warn(
            "TorchWriter is deprecated; use the writer that context.get_tensorboard_writer() returns.",
            FutureWarning,
            stacklevel=2,
        )
        run = latest_run()
        self._output = TensorBoardOutput(enabled=True, locate=_own_directory) if run is None else run.tensorboard

    @property
    def writer(self) -> Any:
        """The ``torch.utils.tensorboard.SummaryWriter`` of the run."""
        return self._output.writer

    def add_scalar(self, name: str, value: int | float | np.number, step: int) -> None:
        """Write a value."""
        self.writer.add_scalar(name, value, step)

    def reset(self) -> None:
        """Close the present file; the next value begins another."""
        self.writer.close()

    def flush(self) -> None:
        """Write out the buffer."""
        self.writer.flush()


def _own_directory() -> Path:
    task = current_task()
    return default_directory() if task is None else task.tensorboard_path
