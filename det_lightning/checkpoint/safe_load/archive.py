"""Unambiguous reading of the zip archives that ``torch.save`` writes.

Python and torch find the entries of an archive by different rules, and a forged one can show each a different list. So
the entries are looked up once, and torch gets a ``PlainArchive`` of them, with the checked content and nothing else.
"""

from __future__ import annotations

import dataclasses
import io
import struct
import zipfile
from typing import IO

END = struct.Struct("<4s4H2IH")
LOCATOR = struct.Struct("<4sIQI")
END_64 = struct.Struct("<4sQ2H2I4Q")
LOCAL = struct.Struct("<4s5H3I2H")
END_MAGIC = b"PK\x05\x06"
LOCATOR_MAGIC = b"PK\x06\x07"
END_64_MAGIC = b"PK\x06\x06"
LOCAL_MAGIC = b"PK\x03\x04"
_ENCRYPTED = 1


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
    file.seek(max(0, size - END_64.size - LOCATOR.size - END.size))
    tail = file.read(END_64.size + LOCATOR.size + END.size)
    if len(tail) < END.size or tail[-END.size :][:4] != END_MAGIC:
        raise ValueError("the end of the archive is missing")
    _, disk, first_disk, here, count, length, begin, comment = END.unpack(tail[-END.size :])
    if disk or first_disk or here != count or comment:
        raise ValueError("the end of the archive is not one of torch.save")
    end = size - END.size
    if tail[: -END.size][-LOCATOR.size :][:4] == LOCATOR_MAGIC:
        end -= LOCATOR.size + END_64.size
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
    if len(tail) < END_64.size + LOCATOR.size + END.size:
        raise ValueError("the end of the archive is missing")
    _, locator_disk, located, disks = LOCATOR.unpack(tail[END_64.size :][: LOCATOR.size])
    magic, length_of_record, _, _, disk, first_disk, here, count, length, begin = END_64.unpack(tail[: END_64.size])
    if (
        (magic, located, length_of_record) != (END_64_MAGIC, position, END_64.size - 12)
        or (locator_disk, disks, disk, first_disk) != (0, 1, 0, 0)
        or here != count
    ):
        raise ValueError("the archive has two lists of its entries, and they differ")
    return count, length, begin


def _locate(file: IO[bytes], found: zipfile.ZipInfo) -> Entry:
    """Return a listed entry with the position of its content; raise unless the header in front of it agrees."""
    file.seek(found.header_offset)
    header = file.read(LOCAL.size)
    if len(header) < LOCAL.size:
        raise ValueError(f"the entry {found.filename!r:.100} lies outside of the archive")
    magic, _, flags, method, _, _, _, _, _, name_length, extra_length = LOCAL.unpack(header)
    name = file.read(name_length)
    listed = found.orig_filename.encode("utf-8" if flags & 0x800 else "cp437", "replace")
    if magic != LOCAL_MAGIC or method != zipfile.ZIP_STORED or flags & _ENCRYPTED or name != listed:
        raise ValueError(f"the entry {found.filename!r:.100} differs from the archive's list")
    begin = found.header_offset + LOCAL.size + name_length + extra_length
    return Entry(found.filename.partition("/")[2], begin, found.file_size, found.CRC)
