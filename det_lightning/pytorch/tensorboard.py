"""The TensorBoard files of a run."""

from __future__ import annotations

import datetime
import functools
import pathlib
import socket
from typing import Any

__all__ = ["TensorBoardOutput"]


class TensorBoardOutput:
    """The place of a run's TensorBoard files, and their writer, made when it is first used.

    Like ``SummaryWriter`` with no directory given, runs go to ``runs/<time>_<host>`` in the working directory.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    @functools.cached_property
    def path(self) -> pathlib.Path:
        """The directory of the files."""
        started = datetime.datetime.now().strftime("%b%d_%H-%M-%S")
        return pathlib.Path("runs") / f"{started}_{socket.gethostname()}"

    @functools.cached_property
    def writer(self) -> Any:
        """A ``torch.utils.tensorboard.SummaryWriter`` on :attr:`path`."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not every run writes

        return SummaryWriter(str(self.path))

    def add_scalars(self, values: dict[str, float], step: int) -> None:
        """Write values by their tags, all at ``step``."""
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, step)

    def flush(self) -> None:
        """Write out what is buffered, if anything was written at all."""
        if "writer" in vars(self):
            self.writer.flush()
