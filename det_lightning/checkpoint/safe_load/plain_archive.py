"""An archive for torch that contains only checked entries, and reads tensors and their checksums in several threads."""

from __future__ import annotations

import bisect
import dataclasses
import io
import os
import struct
import threading
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

import torch
from zlib_ng import zlib_ng

from det_lightning.checkpoint.safe_load import archive
from det_lightning.checkpoint.safe_load.archive import Entry

_CENTRAL = struct.Struct("<4s6H3I5H2I")
_CENTRAL_MAGIC = b"PK\x01\x02"
_VERSION_64 = 45
_CHUNK_BYTES = 1024 * 1024
# Fresh memory costs more than reading, and more than a few threads only wait for memory.
_MOST_THREADS = 4
# Handing a smaller storage to a thread takes longer than reading it.
_SMALL_BYTES = 32 * 1024


class UnknownOrderError(Exception):
    """This release of torch reads storages in a different order than earlier ones."""


@dataclasses.dataclass
class EntryContent:
    """An entry whose first ``checked`` bytes have been read, and have the checksum ``crc32``."""

    entry: Entry
    checked: int = 0
    crc32: int = 0

    def __len__(self) -> int:
        return self.entry.size

    def extend(self, content: memoryview) -> None:
        """Add the bytes that follow those read so far."""
        self.crc32 = zlib_ng.crc32(content, self.crc32)
        self.checked += len(content)


class ContentReader:
    """Reads entries' content from an unbuffered file. Close it before the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lock = threading.Lock()
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._readers = ThreadPoolExecutor(min(processors, _MOST_THREADS), "det_lightning_read")
        self._begun: list[Future[None]] = []

    def read(self, content: EntryContent, offset: int, target: memoryview) -> bool:
        """Fill ``target``; return whether it is full. The checksum of a chunk is computed while it is in the cache."""
        is_next = offset == content.checked
        filled = 0
        while filled < len(target):
            chunk = target[filled : filled + _CHUNK_BYTES]
            count = self._read_at(content.entry.begin + offset + filled, chunk)
            if not count:
                return False
            filled += count
            if is_next:
                content.extend(chunk[:count])
        return True

    def begin(self, content: EntryContent, storage: torch.UntypedStorage) -> None:
        """Start filling a storage on the CPU with all of an entry's content; see :meth:`wait`."""
        # The view keeps the memory alive, whatever happens to the storage meanwhile.
        view = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy().data
        if len(view) < _SMALL_BYTES:
            self._fill(content, view)
        else:
            self._begun.append(self._readers.submit(self._fill, content, view))

    def _fill(self, content: EntryContent, target: memoryview) -> None:
        if not self.read(content, 0, target):
            raise EOFError(f"the entry {content.entry.name!r:.100} ends in the middle")

    def wait(self) -> None:
        """Wait until everything that :meth:`begin` started has been read; for its errors, see `find_damage`."""
        for reading in self._begun:
            reading.result()
        self._begun.clear()

    def close(self) -> None:
        """End the threads; reads that have not started are cancelled."""
        self._readers.shutdown(cancel_futures=True)

    def _read_at(self, position: int, target: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [target], position)
        with self._lock:
            self._file.seek(position)
            count: Any = self._file.readinto(target)  # type: ignore[attr-defined]  # of an unbuffered file
            return int(count)


class Stream(io.RawIOBase):
    """A stream of ``size`` bytes that can be read from any position."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = max(0, origin + offset)
        return self.position


class PlainArchive(Stream):
    """An archive of given entries, without a copy of their content, that computes the checksums of all bytes read.

    Unlike in a file, torch cannot look for another format in it. ``contents`` of some entries are already checked.

    If it ``fills_later``, pass :meth:`fill` to ``torch.load`` as ``map_location``. All other entries must then be the
    content of storages: torch gets their memory uninitialized; it is filled while torch goes on, and complete after
    :meth:`find_damage`. This is for pickles that build nothing from the values of tensors.
    """

    def __init__(
        self, file: IO[bytes], entries: Mapping[str, Entry], contents: Mapping[str, bytes], *, fills_later: bool
    ) -> None:
        super().__init__(size=0)
        self._reader = ContentReader(file)
        self._fills_later = fills_later
        self._left: list[EntryContent] = []
        # Some bytes each: either given, or an entry's content in the file.
        self._parts: list[bytes | EntryContent] = []
        self._begins: list[int] = []
        lines = [
            self._append_entry(f"archive/{name}".encode(), entry, contents.get(name)) for name, entry in entries.items()
        ]
        directory = b"".join(lines)
        begin = self.size
        end_64 = (archive.END_64_MAGIC, archive.END_64.size - 12, _VERSION_64, _VERSION_64, 0, 0)
        count = len(entries)
        self._append(
            directory
            + archive.END_64.pack(*end_64, count, count, len(directory), begin)
            + archive.LOCATOR.pack(archive.LOCATOR_MAGIC, 0, begin + len(directory), 1)
            + archive.END.pack(archive.END_MAGIC, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
        )

    def _append_entry(self, name: bytes, entry: Entry, given: bytes | None) -> bytes:
        """Add an entry; return its line in the list of entries."""
        header_at = self.size
        sizes = struct.pack("<2H2Q", 1, 16, entry.size, entry.size)
        common = (0x800, zipfile.ZIP_STORED, 0, 0, entry.crc32, 0xFFFFFFFF, 0xFFFFFFFF, len(name))
        self._append(archive.LOCAL.pack(archive.LOCAL_MAGIC, _VERSION_64, *common, len(sizes)) + name + sizes)
        self._append(EntryContent(entry) if given is None else given)
        extra = struct.pack("<2H3Q", 1, 24, entry.size, entry.size, header_at)
        line = _CENTRAL.pack(_CENTRAL_MAGIC, _VERSION_64, _VERSION_64, *common, len(extra), 0, 0, 0, 0, 0xFFFFFFFF)
        return line + name + extra

    def _append(self, part: bytes | EntryContent) -> None:
        if size := len(part):
            self._parts.append(part)
            self._begins.append(self.size)
            self.size += size

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        done = 0
        while done < len(target) and self.position < self.size:
            index = bisect.bisect_right(self._begins, self.position) - 1
            part = self._parts[index]
            offset = self.position - self._begins[index]
            wanted = target[done : done + len(part) - offset]
            if isinstance(part, bytes):
                wanted[:] = part[offset : offset + len(wanted)]
            elif self._fills_later:
                self._leave(part, wanted, is_all=len(wanted) == len(target) == len(part))
            elif not self._reader.read(part, offset, wanted):
                break
            done += len(wanted)
            self.position += len(wanted)
        return done

    def _leave(self, content: EntryContent, target: memoryview, is_all: bool) -> None:
        """Leave the memory of a storage to :meth:`fill`; zero other reads, by which torch only looks for headers."""
        if not is_all:
            target[:] = bytes(len(target))
            return
        # An error raised here would not reach the caller of torch.load.
        self._left.append(content)

    def fill(self, storage: torch.UntypedStorage, _location: str) -> torch.UntypedStorage:
        """Start filling the storage that torch has just read, and leave it on the CPU; raise ``UnknownOrderError``
        if torch has not just read it.
        """
        if storage.nbytes():
            if len(self._left) != 1 or len(self._left[0]) != storage.nbytes():
                raise UnknownOrderError("torch.load asks where to load a storage that it has not just read")
            self._reader.begin(self._left.pop(), storage)
        return storage

    def find_damage(self) -> list[str]:
        """Wait for all content, and read what torch did not; return the names of entries whose checksum differs.

        Raise an ``UnknownOrderError`` if torch has not asked where to load a storage, an ``EOFError`` if the file has
        become shorter, and an ``OSError`` if it cannot be read.
        """
        if self._left:
            raise UnknownOrderError(f"torch.load has not asked where to load {self._left[0].entry.name!r:.100}")
        self._reader.wait()
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        contents = [part for part in self._parts if isinstance(part, EntryContent)]
        for content in contents:
            while (rest := len(content) - content.checked) > 0:
                if not self._reader.read(content, content.checked, buffer[:rest]):
                    break
        return [one.entry.name for one in contents if (one.checked, one.crc32) != (one.entry.size, one.entry.crc32)]

    def close(self) -> None:
        """End the threads that read and compute checksums; the file stays open."""
        self._reader.close()
        super().close()
