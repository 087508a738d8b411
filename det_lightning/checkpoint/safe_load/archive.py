"""Unambiguous reading of the zip archives that ``torch.save`` writes, of tensors and checksums in several threads.

Python and torch find the entries of an archive by different rules, and a forged one can show each a different list. So
the entries are looked up once, and torch gets a ``PlainArchive`` of them, with the checked content and nothing else.
"""

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

_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END_MAGIC = b"PK\x05\x06"
_LOCATOR_MAGIC = b"PK\x06\x07"
_END_64_MAGIC = b"PK\x06\x06"
_LOCAL_MAGIC = b"PK\x03\x04"
_CENTRAL_MAGIC = b"PK\x01\x02"
_ENCRYPTED = 1
_VERSION_64 = 45

_CHUNK_BYTES = 1024 * 1024
# Fresh memory costs more than reading, and more than a few threads only wait for memory.
_MOST_THREADS = 4
# Handing a smaller storage to a thread takes longer than reading it.
_SMALL_BYTES = 32 * 1024


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file in an archive: its path below the archive's directory, and position, size and checksum of its content."""

    name: str
    begin: int
    size: int
    crc32: int


def read_entries(file: IO[bytes]) -> dict[str, Entry]:
    """Return the entries of an archive by their names."""
    size = file.seek(0, io.SEEK_END)
    directory = _find_directory(file, size)
    with zipfile.ZipFile(file) as archive:
        listed = archive.infolist()
    # torch ignores case. Python truncates names at a zero byte, and torch does not.
    if len({entry.filename.lower() for entry in listed}) < len(listed) or any(
        entry.orig_filename != entry.filename for entry in listed
    ):
        raise ValueError("torch.save does not use a name twice")
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size for entry in listed):
        unpacked = sum(entry.file_size for entry in listed)
        raise ValueError(f"it has {size:,} bytes and declares {unpacked:,}; torch.save compresses nothing")
    roots = {entry.filename.partition("/")[0] for entry in listed}
    if len(roots) != 1:
        raise ValueError(f"torch.save puts everything into one directory; the archive has {len(roots):,}")
    entries = {}
    last_end = 0
    for found in sorted(listed, key=lambda entry: entry.header_offset):
        entry = _locate(file, found)
        if found.header_offset < last_end:
            raise ValueError(f"the entry {found.filename!r:.100} begins inside another one")
        last_end = entry.begin + entry.size
        entries[entry.name] = entry
    if last_end > directory:
        raise ValueError(f"the archive declares {last_end:,} bytes of content; it has {directory:,}")
    return entries


def _find_directory(file: IO[bytes], size: int) -> int:
    """Return the position of the list of entries, if the end of the archive holds exactly one."""
    file.seek(max(0, size - _END_64.size - _LOCATOR.size - _END.size))
    tail = file.read(_END_64.size + _LOCATOR.size + _END.size)
    if len(tail) < _END.size or tail[-_END.size :][:4] != _END_MAGIC:
        raise ValueError("the end of the archive is missing")
    _, disk, first_disk, here, count, length, begin, comment = _END.unpack(tail[-_END.size :])
    if disk or first_disk or here != count or comment:
        raise ValueError("the end of the archive is not one of torch.save")
    end = size - _END.size
    if tail[: -_END.size][-_LOCATOR.size :][:4] == _LOCATOR_MAGIC:
        end -= _LOCATOR.size + _END_64.size
        small = (count, length, begin)
        count, length, begin = _read_end_64(tail, end)
        limits = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
        if any(
            one not in (other, limit) for one, other, limit in zip(small, (count, length, begin), limits, strict=True)
        ):
            raise ValueError("the archive has two lists of its entries, and they differ")
    if begin + length != end:
        raise ValueError("the list of the archive's entries is not where it should be")
    return int(begin)


def _read_end_64(tail: bytes, position: int) -> tuple[int, int, int]:
    """Return the number of entries, and the length and position of their list, from the record for large archives."""
    if len(tail) < _END_64.size + _LOCATOR.size + _END.size:
        raise ValueError("the end of the archive is missing")
    _, locator_disk, located, disks = _LOCATOR.unpack(tail[_END_64.size :][: _LOCATOR.size])
    magic, length_of_record, _, _, disk, first_disk, here, count, length, begin = _END_64.unpack(tail[: _END_64.size])
    if (
        (magic, located, length_of_record) != (_END_64_MAGIC, position, _END_64.size - 12)
        or (locator_disk, disks, disk, first_disk) != (0, 1, 0, 0)
        or here != count
    ):
        raise ValueError("the archive has two lists of its entries, and they differ")
    return count, length, begin


def _locate(file: IO[bytes], found: zipfile.ZipInfo) -> Entry:
    """Return a listed entry with the position of its content; raise unless the header in front of it agrees."""
    file.seek(found.header_offset)
    header = file.read(_LOCAL.size)
    if len(header) < _LOCAL.size:
        raise ValueError(f"the entry {found.filename!r:.100} lies outside of the archive")
    magic, _, flags, method, _, _, _, _, _, name_length, extra_length = _LOCAL.unpack(header)
    name = file.read(name_length)
    listed = found.orig_filename.encode("utf-8" if flags & 0x800 else "cp437", "replace")
    if magic != _LOCAL_MAGIC or method != zipfile.ZIP_STORED or flags & _ENCRYPTED or name != listed:
        raise ValueError(f"the entry {found.filename!r:.100} differs from the archive's list")
    begin = found.header_offset + _LOCAL.size + name_length + extra_length
    return Entry(found.filename.partition("/")[2], begin, found.file_size, found.CRC)


class UnknownOrderError(Exception):
    """This release of torch reads storages in a different order than earlier ones."""


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


@dataclasses.dataclass
class _Content:
    """The content of an entry, whose first ``checked`` bytes have been read, and have the checksum ``crc32``."""

    entry: Entry
    checked: int = 0
    crc32: int = 0

    def __len__(self) -> int:
        return self.entry.size


class PlainArchive(Stream):
    """An archive of given entries, without a copy of their content, that computes the checksums of all bytes read.

    Unlike in a file, torch cannot look for another format in it. ``file`` is unbuffered, and stays open. ``contents``
    of some entries are already checked.

    If it ``fills_later``, pass :meth:`fill` to ``torch.load`` as ``map_location``. All other entries must then be the
    content of storages: torch gets their memory uninitialized; it is filled while torch goes on, and complete after
    :meth:`find_damage`. This is for pickles that build nothing from the values of tensors.
    """

    def __init__(
        self, file: IO[bytes], entries: Mapping[str, Entry], contents: Mapping[str, bytes], *, fills_later: bool
    ) -> None:
        super().__init__(size=0)
        self._file = file
        self._lock = threading.Lock()
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = ThreadPoolExecutor(min(processors, _MOST_THREADS), "det_lightning_read")
        self._filling: list[Future[None]] = []
        self._fills_later = fills_later
        self._left: list[_Content] = []
        # Some bytes each: either given, or an entry's content in the file.
        self._parts: list[bytes | _Content] = []
        self._begins: list[int] = []
        lines = [
            self._append_entry(f"archive/{name}".encode(), entry, contents.get(name)) for name, entry in entries.items()
        ]
        directory = b"".join(lines)
        begin = self.size
        end_64 = (_END_64_MAGIC, _END_64.size - 12, _VERSION_64, _VERSION_64, 0, 0)
        count = len(entries)
        self._append(
            directory
            + _END_64.pack(*end_64, count, count, len(directory), begin)
            + _LOCATOR.pack(_LOCATOR_MAGIC, 0, begin + len(directory), 1)
            + _END.pack(_END_MAGIC, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
        )

    def _append_entry(self, name: bytes, entry: Entry, given: bytes | None) -> bytes:
        """Add an entry; return its line in the list of entries."""
        header_at = self.size
        sizes = struct.pack("<2H2Q", 1, 16, entry.size, entry.size)
        common = (0x800, zipfile.ZIP_STORED, 0, 0, entry.crc32, 0xFFFFFFFF, 0xFFFFFFFF, len(name))
        self._append(_LOCAL.pack(_LOCAL_MAGIC, _VERSION_64, *common, len(sizes)) + name + sizes)
        self._append(_Content(entry) if given is None else given)
        extra = struct.pack("<2H3Q", 1, 24, entry.size, entry.size, header_at)
        line = _CENTRAL.pack(_CENTRAL_MAGIC, _VERSION_64, _VERSION_64, *common, len(extra), 0, 0, 0, 0, 0xFFFFFFFF)
        return line + name + extra

    def _append(self, part: bytes | _Content) -> None:
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
            elif self._fills_later and len(wanted) == len(target) == len(part):
                self._left.append(part)  # for fill(); an error raised here would not reach the caller of torch.load
            elif self._fills_later:
                wanted[:] = bytes(len(wanted))  # torch only looks for headers here
            elif not self._read(part, offset, wanted):
                break
            done += len(wanted)
            self.position += len(wanted)
        return done

    def _read(self, content: _Content, offset: int, target: memoryview) -> bool:
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
                content.crc32 = zlib_ng.crc32(chunk[:count], content.crc32)
                content.checked += count
        return True

    def _read_at(self, position: int, target: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [target], position)
        with self._lock:
            self._file.seek(position)
            count: int = self._file.readinto(target)  # type: ignore[attr-defined]  # of an unbuffered file
            return count

    def fill(self, storage: torch.UntypedStorage, _location: str) -> torch.UntypedStorage:
        """Start filling the storage that torch has just read, and leave it on the CPU; raise ``UnknownOrderError``
        if torch has not just read it.
        """
        if not storage.nbytes():
            return storage
        if len(self._left) != 1 or len(self._left[0]) != storage.nbytes():
            raise UnknownOrderError("torch.load asks where to load a storage that it has not just read")
        content = self._left.pop()
        # The view keeps the memory alive, whatever happens to the storage meanwhile.
        view = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy().data
        if len(view) < _SMALL_BYTES:
            self._fill(content, view)
        else:
            self._filling.append(self._threads.submit(self._fill, content, view))
        return storage

    def _fill(self, content: _Content, target: memoryview) -> None:
        if not self._read(content, 0, target):
            raise EOFError(f"the entry {content.entry.name!r:.100} ends in the middle")

    def find_damage(self) -> list[str]:
        """Wait for all content, and read what torch did not; return the names of entries whose checksum differs.

        Raise an ``UnknownOrderError`` if torch has not asked where to load a storage, an ``EOFError`` if the file has
        become shorter, and an ``OSError`` if it cannot be read.
        """
        if self._left:
            raise UnknownOrderError(f"torch.load has not asked where to load {self._left[0].entry.name!r:.100}")
        for one in self._filling:
            one.result()
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        contents = [part for part in self._parts if isinstance(part, _Content)]
        for content in contents:
            while (rest := len(content) - content.checked) > 0:
                if not self._read(content, content.checked, buffer[:rest]):
                    break
        return [one.entry.name for one in contents if (one.checked, one.crc32) != (one.entry.size, one.entry.crc32)]

    def close(self) -> None:
        """End the threads; reads that have not started are cancelled."""
        self._threads.shutdown(cancel_futures=True)
        super().close()
