"""TensorBoard's event files. Slow to import, because of tensorboard."""

from __future__ import annotations

import functools
import os
import pathlib
import socket
import struct
import time
from collections.abc import Iterable

import google_crc32c
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.proto.summary_pb2 import Summary


class EventFile:
    """A new TensorBoard file in a directory, which takes many scalars at once."""

    def __init__(self, directory: pathlib.Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        started = time.time()
        self.path = directory / f"events.out.tfevents.{int(started)}.{socket.gethostname()}.{os.getpid()}.scalars"
        self._append([event_pb2.Event(wall_time=started, file_version="brain.Event:2").SerializeToString()])

    def write(self, scalars: list[tuple[str, float, int]]) -> None:
        """Append ``(tag, value, step)`` triples."""
        event = event_pb2.Event(wall_time=time.time())
        entry = event.summary.value.add()
        events = []
        for entry.tag, entry.simple_value, event.step in scalars:
            events.append(event.SerializeToString())
        self._append(events)

    def write_summary(self, summary: Summary) -> None:
        """Append a summary."""
        self._append([event_pb2.Event(wall_time=time.time(), summary=summary).SerializeToString()])

    def _append(self, events: Iterable[bytes]) -> None:
        # One write for all; and tensorboard's own writer spends most of its time on checksums, in Python.
        with self.path.open("ab") as file:
            file.write(b"".join(_as_record(event) for event in events))


def _as_record(data: bytes) -> bytes:
    """Frame an event as a TFRecord: length, its checksum, data, their checksum (tensorflow.org, "TFRecord")."""
    return _record_start(len(data)) + data + _masked_checksum(data)


@functools.lru_cache(maxsize=64)  # events of the same metric have few different lengths
def _record_start(length: int) -> bytes:
    packed = struct.pack("<Q", length)
    return packed + _masked_checksum(packed)


def _masked_checksum(data: bytes) -> bytes:
    checksum = google_crc32c.value(data)
    rotated = (checksum >> 15) | (checksum << 17)
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)
