"""``TensorBoardOutput`` and ``EventFile``: the TensorBoard files of a run, their tags and format."""

from __future__ import annotations

import functools
import os
import pathlib
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from fastcrc.crc32 import iscsi as compute_crc32c

from det_lightning.core._reports import as_float, select_scalars


class TensorBoardOutput:
    """The TensorBoard files of a run, in a directory from ``locate``, created on first use.

    The tags of metrics are Determined's: ``Determined/<metric>`` for each training batch, counted from 0, and
    ``Determined/val_<metric>`` for each validation, at the number of batches trained. A name that begins with ``val``
    gets no further ``val_``.
    """

    def __init__(self, enabled: bool, locate: Callable[[], pathlib.Path]) -> None:
        self.enabled = enabled
        self._locate = locate

    @functools.cached_property
    def path(self) -> pathlib.Path:
        return pathlib.Path(self._locate())

    @functools.cached_property
    def writer(self) -> Any:
        """A ``torch.utils.tensorboard.SummaryWriter`` on :attr:`path`."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not every run writes

        return SummaryWriter(str(self.path))

    def add_training(
        self, steps_completed: int, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        """Write the metrics of each batch, and averages that belong to no batch, such as those of reducers."""
        scalars = [
            (f"Determined/{name}", number, step)
            for step, metrics in enumerate(batch_metrics, start=steps_completed - len(batch_metrics))
            for name, value in metrics.items()
            if (number := as_float(value)) is not None
        ]
        reduced = select_scalars(avg_metrics, leave_out=set().union(*batch_metrics))
        scalars += [(f"Determined/{name}", number, steps_completed) for name, number in reduced.items()]
        self.add_scalars(scalars)

    def add_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        scalars = select_scalars(metrics).items()
        self.add_scalars([(make_validation_tag(name), value, steps_completed) for name, value in scalars])

    def add_scalars(self, scalars: list[tuple[str, float, int]]) -> None:
        """Write and flush ``(tag, value, step)`` triples.

        Until :attr:`writer` is used, the triples go to a separate file in a single write, since a ``SummaryWriter``
        writes each value separately. Later the writer is used, because TensorBoard follows a directory's latest file
        only.
        """
        if not scalars:
            return
        if "writer" in vars(self):
            for tag, value, step in scalars:
                self.writer.add_scalar(tag, value, step)
            self.writer.flush()
        else:
            self._event_file.write(scalars)

    def add_summary(self, summary: Any) -> None:
        """Write a ``Summary`` of TensorBoard of any kind, for example of a plugin."""
        if "writer" in vars(self):
            self.writer.file_writer.add_summary(summary)
            self.writer.flush()
        else:
            self._event_file.write_summary(summary)

    @functools.cached_property
    def _event_file(self) -> EventFile:
        return EventFile(self.path)


class EventFile:
    """A new TensorBoard file in a directory, for many scalars at a time."""

    def __init__(self, directory: pathlib.Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # slow to import, and not every run writes

        self._new_event = Event
        directory.mkdir(parents=True, exist_ok=True)
        started = time.time()
        self.path = directory / f"events.out.tfevents.{int(started)}.{socket.gethostname()}.{os.getpid()}.scalars"
        self._append([Event(wall_time=started, file_version="brain.Event:2").SerializeToString()])

    def write(self, scalars: list[tuple[str, float, int]]) -> None:
        event = self._new_event(wall_time=time.time())
        entry = event.summary.value.add()
        self._append([event.SerializeToString() for entry.tag, entry.simple_value, event.step in scalars])

    def write_summary(self, summary: Any) -> None:
        self._append([self._new_event(wall_time=time.time(), summary=summary).SerializeToString()])

    def _append(self, events: list[bytes]) -> None:
        """Append TFRecords: an event's length and event, each followed by a masked checksum."""
        # In a single write; tensorboard's own writer would spend most of its time on checksums, in Python.
        lengths = list({len(event) for event in events})
        headers = dict(zip(lengths, _append_checksums([struct.pack("<Q", length) for length in lengths]), strict=True))
        records = [headers[len(event)] + body for event, body in zip(events, _append_checksums(events), strict=True)]
        with self.path.open("ab") as file:
            file.write(b"".join(records))


def _append_checksums(pieces: list[bytes]) -> list[bytes]:
    extended = []
    for piece in pieces:
        checksum = compute_crc32c(piece)
        masked = ((checksum >> 15) | (checksum << 17)) + 0xA282EAD8
        extended.append(piece + struct.pack("<I", masked & 0xFFFFFFFF))
    return extended


def make_validation_tag(metric: str) -> str:
    return f"Determined/{metric}" if metric.startswith("val") else f"Determined/val_{metric}"
