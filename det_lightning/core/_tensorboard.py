"""The TensorBoard files of a run."""

from __future__ import annotations

import datetime
import functools
import pathlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from det_lightning.core._metrics import as_float, scalars_of

if TYPE_CHECKING:  # slow to import, and not every run writes
    from tensorboard.compat.proto.summary_pb2 import Summary

    from det_lightning.core._event_file import EventFile


class TensorBoardOutput:
    """The directory of a run's TensorBoard files, which ``locate`` returns, and their writer, created on first use.

    The tags of metrics are Determined's: ``Determined/<metric>`` for each training batch, counted from 0, and
    ``Determined/val_<metric>`` for each validation, at the number of batches trained before it. A name that already
    begins with ``val`` gets no ``val_``.
    """

    def __init__(self, enabled: bool, locate: Callable[[], pathlib.Path] | None = None) -> None:
        self.enabled = enabled
        self._locate = locate or default_directory

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:
        """Switch the writing of TensorBoard files on or off.

        Raises:
            AssertionError: the argument is not a bool.
        """
        if not isinstance(enable_tensorboard_logging, bool):
            raise AssertionError(f"set_enable_tensorboard_logging() takes a bool; got {enable_tensorboard_logging!r}.")
        self.enabled = enable_tensorboard_logging

    def get_enable_tensorboard_logging(self) -> bool:
        """Return whether metrics are written as TensorBoard files."""
        return self.enabled

    @functools.cached_property
    def path(self) -> pathlib.Path:
        """The directory of the files."""
        return pathlib.Path(self._locate())

    @functools.cached_property
    def writer(self) -> Any:
        """A ``torch.utils.tensorboard.SummaryWriter`` on :attr:`path`."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not every run writes

        return SummaryWriter(str(self.path))

    def add_training(
        self, steps_completed: int, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        """Write the metrics of each batch, and those averages that no batch has, such as the metrics of reducers."""
        scalars = [
            (f"Determined/{name}", number, step)
            for step, metrics in enumerate(batch_metrics, start=steps_completed - len(batch_metrics))
            for name, value in metrics.items()
            if (number := as_float(value)) is not None
        ]
        of_batches: set[str] = set().union(*batch_metrics)
        reduced = {name: value for name, value in avg_metrics.items() if name not in of_batches}
        self.add_scalars(scalars + _tagged(reduced, steps_completed))

    def add_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Write the metrics of a validation."""
        scalars = scalars_of(metrics).items()
        self.add_scalars([(validation_tag(name), value, steps_completed) for name, value in scalars])

    def add_scalars(self, scalars: list[tuple[str, float, int]]) -> None:
        """Write ``(tag, value, step)`` triples and flush them.

        Until :attr:`writer` is used, they go to a separate file in one write: a ``SummaryWriter`` reopens its file for
        each value. From then on the writer is used, because TensorBoard follows only the latest file of a directory.
        """
        if not scalars:
            return
        if "writer" in vars(self):
            for tag, value, step in scalars:
                self.writer.add_scalar(tag, value, step)
            self.writer.flush()
        else:
            self._event_file.write(scalars)

    def add_summary(self, summary: Summary) -> None:
        """Write a summary of any kind, such as a plugin's."""
        if "writer" in vars(self):
            self.writer.file_writer.add_summary(summary)
            self.writer.flush()
        else:
            self._event_file.write_summary(summary)

    @functools.cached_property
    def _event_file(self) -> EventFile:
        from det_lightning.core._event_file import EventFile

        return EventFile(self.path)


def _tagged(metrics: dict[str, Any], step: int) -> list[tuple[str, float, int]]:
    return [(f"Determined/{name}", value, step) for name, value in scalars_of(metrics).items()]


def validation_tag(metric: str) -> str:
    """Return the tag of a validation metric."""
    return f"Determined/{metric}" if metric.startswith("val") else f"Determined/val_{metric}"


def default_directory() -> pathlib.Path:
    """Return a new directory below ``runs/``."""
    started = datetime.datetime.now().strftime("%b%d_%H-%M-%S")
    return pathlib.Path(f"runs/{started}_{socket.gethostname()}")
