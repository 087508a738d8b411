"""TensorBoard's event files. Importing this module is slow, because of tensorboard."""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import socket
import struct
import time
from collections.abc import Sequence

import google_crc32c
import numpy as np
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
        self._append([event.SerializeToString() for entry.tag, entry.simple_value, event.step in scalars])

    def write_summary(self, summary: Summary) -> None:
        """Append a summary."""
        self._append([event_pb2.Event(wall_time=time.time(), summary=summary).SerializeToString()])

    def _append(self, events: Sequence[bytes]) -> None:
        # A single write; tensorboard's own writer would spend most of its time on checksums, in Python.
        with self.path.open("ab") as file:
            file.write(_as_records(events))


def _as_records(events: Sequence[bytes]) -> bytes:
    """Frame events as TFRecords: length, its checksum, data, their checksum (tensorflow.org, "TFRecord")."""
    starts = map(_record_start, map(len, events))
    return b"".join(itertools.chain.from_iterable(zip(starts, events, _masked_checksums(events), strict=True)))


@functools.lru_cache(maxsize=64)  # events have only a few different lengths
def _record_start(length: int) -> bytes:
    packed = struct.pack("<Q", length)
    return packed + _masked_checksums([packed])[0]


def _masked_checksums(pieces: Sequence[bytes]) -> list[bytes]:
    # Calling numpy for each event would take longer than the checksums.
    checksums = np.fromiter(map(google_crc32c.value, pieces), np.uint32, len(pieces))
    masked = ((checksums >> np.uint32(15)) | (checksums << np.uint32(17))) + np.uint32(0xA282EAD8)
    packed = masked.astype("<u4").tobytes()
    return [packed[begin : begin + 4] for begin in range(0, len(packed), 4)]
