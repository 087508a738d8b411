"""Unambiguous reading of the zip archives that ``torch.save`` writes.

Python and torch find the entries of an archive by different rules, and a made-up one can show each another list. So the
entries are looked up once, and torch gets a :class:`PlainArchive` of them, with the checked content and nothing else.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

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
    # torch ignores the case of letters. A name that Python cuts off at a zero byte is another one to torch.
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
    """Return number of entries, length and begin of their list from the record for large archives."""
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
    """Return an entry of the list with the position of its content, if the header before that agrees."""
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


@dataclasses.dataclass
class _Part:
    """Some bytes of a :class:`PlainArchive`: either given, or an entry's content, which lies in a file.

    The first ``checked`` bytes of an entry were read, and have the checksum ``crc32``.
    """

    begin: int
    size: int
    content: bytes | None = None
    entry: Entry | None = None
    checked: int = 0
    crc32: int = 0


class PlainArchive(io.RawIOBase):
    """An archive of given entries, without a copy of their content, that computes the checksums of all bytes read.

    torch cannot look for another format in it, as in a file. ``contents`` of some entries were compared already.
    """

    def __init__(self, file: IO[bytes], entries: Mapping[str, Entry], contents: Mapping[str, bytes]) -> None:
        super().__init__()
        self._file = file
        self._position = 0
        self._size = 0
        self._parts: list[_Part] = []
        directory = b""
        for name, entry in entries.items():
            directory += self._append_entry(f"archive/{name}".encode(), entry, contents.get(name))
        begin = self._size
        end_64 = (_END_64_MAGIC, _END_64.size - 12, _VERSION_64, _VERSION_64, 0, 0)
        count = len(entries)
        self._append(
            directory
            + _END_64.pack(*end_64, count, count, len(directory), begin)
            + _LOCATOR.pack(_LOCATOR_MAGIC, 0, begin + len(directory), 1)
            + _END.pack(_END_MAGIC, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
        )
        self._begins = [part.begin for part in self._parts]
        self._worker = ThreadPoolExecutor(1, "det_lightning_checksum")

    def _append_entry(self, name: bytes, entry: Entry, content: bytes | None) -> bytes:
        """Add an entry; return its line in the list of entries."""
        header_at = self._size
        sizes = struct.pack("<2H2Q", 1, 16, entry.size, entry.size)
        common = (0x800, zipfile.ZIP_STORED, 0, 0, entry.crc32, 0xFFFFFFFF, 0xFFFFFFFF, len(name))
        self._append(_LOCAL.pack(_LOCAL_MAGIC, _VERSION_64, *common, len(sizes)) + name + sizes)
        if content is not None:
            self._append(content)
        elif entry.size:
            self._parts.append(_Part(self._size, entry.size, entry=entry))
            self._size += entry.size
        extra = struct.pack("<2H3Q", 1, 24, entry.size, entry.size, header_at)
        line = _CENTRAL.pack(_CENTRAL_MAGIC, _VERSION_64, _VERSION_64, *common, len(extra), 0, 0, 0, 0, 0xFFFFFFFF)
        return line + name + extra

    def _append(self, content: bytes) -> None:
        if content:
            self._parts.append(_Part(self._size, len(content), content))
            self._size += len(content)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        done = 0
        while done < len(target) and 0 <= self._position < self._size:
            part = self._parts[bisect.bisect_right(self._begins, self._position) - 1]
            offset = self._position - part.begin
            wanted = target[done : done + part.size - offset]
            if part.entry is None:
                assert part.content is not None
                wanted[:] = part.content[offset : offset + len(wanted)]
            elif not self._read_entry(part, part.entry, offset, wanted):
                break
            done += len(wanted)
            self._position += len(wanted)
        return done

    def _read_entry(self, part: _Part, entry: Entry, offset: int, target: memoryview) -> bool:
        """Fill ``target``; return whether it is full. Checksums are computed while the next bytes are read."""
        latest: Future[None] | None = None
        is_next = offset == part.checked
        self._file.seek(entry.begin + offset)
        filled = 0
        while filled < len(target):
            chunk = target[filled : filled + _CHUNK_BYTES]
            count = self._file.readinto(chunk)  # type: ignore[attr-defined]  # of an unbuffered file
            if not count:
                break
            filled += count
            if is_next:
                latest = self._worker.submit(functools.partial(_extend, part), chunk[:count])
        if latest is not None:
            latest.result()
        return filled == len(target)

    def find_damage(self) -> list[str]:
        """Return the names of entries whose content does not match their checksum; read the rest for that."""
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        damaged = []
        for part in self._parts:
            while part.entry is not None and part.checked < part.size:
                if not self._read_entry(part, part.entry, part.checked, buffer[: part.size - part.checked]):
                    break
            if part.entry is not None and (part.checked, part.crc32) != (part.size, part.entry.crc32):
                damaged.append(part.entry.name)
        return damaged

    def close(self) -> None:
        """End the thread that computes checksums; the file stays open."""
        if not self.closed:
            self._worker.shutdown()
        super().close()


def _extend(part: _Part, content: memoryview) -> None:
    part.crc32 = zlib.crc32(content, part.crc32)
    part.checked += len(content)
