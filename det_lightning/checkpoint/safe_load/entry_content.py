"""Reading the content of an archive's entries with several threads, which compute its checksums on the way."""

from __future__ import annotations

import dataclasses
import os
import threading
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

import torch

from det_lightning.checkpoint.safe_load.archive import Entry

_CHUNK_BYTES = 1024 * 1024
# Fresh memory costs more than the bytes, and each thread gets its own; beyond a few they wait for the memory.
_MOST_THREADS = 4
# Handing a smaller storage to a thread takes longer than reading it.
_SMALL_BYTES = 32 * 1024


@dataclasses.dataclass
class EntryContent:
    """An entry whose first ``checked`` bytes were read, and have the checksum ``crc32``."""

    entry: Entry
    checked: int = 0
    crc32: int = 0

    @property
    def is_intact(self) -> bool:
        """Whether all of it was read, and has the checksum of the archive's list."""
        return (self.checked, self.crc32) == (self.entry.size, self.entry.crc32)

    def extend(self, content: memoryview) -> None:
        """Note the bytes that follow those that were read."""
        self.crc32 = zlib.crc32(content, self.crc32)
        self.checked += len(content)


class ContentReader:
    """Reads entries' content from an unbuffered file. Close it before the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(_thread_count(), "det_lightning_read")
        # One thread of its own, so that a reader can wait for it.
        self._checksums = ThreadPoolExecutor(1, "det_lightning_checksum")
        self._begun: list[Future[None]] = []

    def read(self, content: EntryContent, offset: int, target: memoryview) -> bool:
        """Fill ``target``; return whether it is full. Checksums are computed while the next bytes are read."""
        latest: Future[None] | None = None
        is_next = offset == content.checked
        filled = 0
        while filled < len(target):
            chunk = target[filled : filled + _CHUNK_BYTES]
            count = self._read_at(content.entry.begin + offset + filled, chunk)
            if not count:
                break
            filled += count
            if latest is not None:
                latest.result()
                latest = None
            if is_next and filled == len(target):
                content.extend(chunk[:count])
            elif is_next:
                latest = self._checksums.submit(content.extend, chunk[:count])
        if latest is not None:
            latest.result()
        return filled == len(target)

    def begin(self, content: EntryContent, storage: torch.UntypedStorage) -> None:
        """Begin to fill a storage on the CPU with all of an entry's content; see :meth:`wait`."""
        # The view keeps the memory alive, whatever becomes of the storage meanwhile.
        view = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy().data
        if len(view) < _SMALL_BYTES:
            self._fill(content, view)
        else:
            self._begun.append(self._readers.submit(self._fill, content, view))

    def _fill(self, content: EntryContent, target: memoryview) -> None:
        if not self.read(content, 0, target):
            raise EOFError(f"the entry {content.entry.name!r:.100} ends in the middle")

    def wait(self) -> None:
        """Wait until all that was begun is read.

        Raises:
            EOFError: the file has become shorter.
            OSError: it cannot be read.
        """
        for reading in self._begun:
            reading.result()
        self._begun.clear()

    def close(self) -> None:
        """End the threads; what was not begun to be read is left."""
        self._readers.shutdown(cancel_futures=True)
        self._checksums.shutdown()

    def _read_at(self, position: int, target: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [target], position)
        with self._lock:
            self._file.seek(position)
            count: Any = self._file.readinto(target)  # type: ignore[attr-defined]  # of an unbuffered file
            return int(count)


def _thread_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    return min(os.cpu_count() or 1, _MOST_THREADS)
