"""An archive for torch that shows checked entries, and reads tensors with several threads."""

from __future__ import annotations

import bisect
import dataclasses
import io
import struct
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import torch

from det_lightning.checkpoint.safe_load import archive
from det_lightning.checkpoint.safe_load.archive import Entry
from det_lightning.checkpoint.safe_load.entry_content import ContentReader, EntryContent

_CENTRAL = struct.Struct("<4s6H3I5H2I")
_CENTRAL_MAGIC = b"PK\x01\x02"
_VERSION_64 = 45
_CHUNK_BYTES = 1024 * 1024


class UnknownOrderError(Exception):
    """This release of torch reads storages in another order than those so far."""


@dataclasses.dataclass
class _Part:
    """Some bytes of a :class:`PlainArchive`: either given, or an entry's content, which lies in a file."""

    begin: int
    size: int
    given: bytes | None = None
    content: EntryContent | None = None


class PlainArchive(io.RawIOBase):
    """An archive of given entries, without a copy of their content, that computes the checksums of all bytes read.

    torch cannot look for another format in it, as in a file. ``contents`` of some entries were compared already.

    If it ``fills_later``, pass :meth:`fill` to ``torch.load`` as ``map_location``: the others are then the content of
    storages, whose memory torch gets as it is; it is filled while torch goes on, and complete after
    :meth:`find_damage`. This is for pickles that build nothing from the values of tensors.
    """

    def __init__(
        self, file: IO[bytes], entries: Mapping[str, Entry], contents: Mapping[str, bytes], *, fills_later: bool
    ) -> None:
        super().__init__()
        self._reader = ContentReader(file)
        self._fills_later = fills_later
        self._left: list[EntryContent] = []
        self._position = 0
        self._size = 0
        self._parts: list[_Part] = []
        directory = b""
        for name, entry in entries.items():
            directory += self._append_entry(f"archive/{name}".encode(), entry, contents.get(name))
        begin = self._size
        end_64 = (archive.END_64_MAGIC, archive.END_64.size - 12, _VERSION_64, _VERSION_64, 0, 0)
        count = len(entries)
        self._append(
            directory
            + archive.END_64.pack(*end_64, count, count, len(directory), begin)
            + archive.LOCATOR.pack(archive.LOCATOR_MAGIC, 0, begin + len(directory), 1)
            + archive.END.pack(archive.END_MAGIC, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
        )
        self._begins = [part.begin for part in self._parts]

    def _append_entry(self, name: bytes, entry: Entry, given: bytes | None) -> bytes:
        """Add an entry; return its line in the list of entries."""
        header_at = self._size
        sizes = struct.pack("<2H2Q", 1, 16, entry.size, entry.size)
        common = (0x800, zipfile.ZIP_STORED, 0, 0, entry.crc32, 0xFFFFFFFF, 0xFFFFFFFF, len(name))
        self._append(archive.LOCAL.pack(archive.LOCAL_MAGIC, _VERSION_64, *common, len(sizes)) + name + sizes)
        if given is not None:
            self._append(given)
        elif entry.size:
            self._parts.append(_Part(self._size, entry.size, content=EntryContent(entry)))
            self._size += entry.size
        extra = struct.pack("<2H3Q", 1, 24, entry.size, entry.size, header_at)
        line = _CENTRAL.pack(_CENTRAL_MAGIC, _VERSION_64, _VERSION_64, *common, len(extra), 0, 0, 0, 0, 0xFFFFFFFF)
        return line + name + extra

    def _append(self, given: bytes) -> None:
        if given:
            self._parts.append(_Part(self._size, len(given), given))
            self._size += len(given)

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
            if part.given is not None:
                wanted[:] = part.given[offset : offset + len(wanted)]
            elif part.content is not None and self._fills_later:
                self._leave(part.content, wanted, is_all=len(wanted) == len(target) == part.size)
            elif part.content is not None and not self._reader.read(part.content, offset, wanted):
                break
            done += len(wanted)
            self._position += len(wanted)
        return done

    def _leave(self, content: EntryContent, target: memoryview, is_all: bool) -> None:
        """Leave the memory of a storage to :meth:`fill`. What else torch reads there, it searches for other things."""
        if not is_all:
            target[:] = bytes(len(target))
            return
        # An error raised here would not reach the caller of torch.load.
        self._left.append(content)

    def fill(self, storage: torch.UntypedStorage, _location: str) -> torch.UntypedStorage:
        """Begin to fill the storage that torch has just read; leave it on the CPU.

        Raises:
            UnknownOrderError: torch has not just read it.
        """
        if storage.nbytes():
            if len(self._left) != 1 or self._left[0].entry.size != storage.nbytes():
                raise UnknownOrderError("torch.load asks where to load a storage that it has not just read")
            self._reader.begin(self._left.pop(), storage)
        return storage

    def find_damage(self) -> list[str]:
        """Wait for all content. Return the names of entries whose checksum differs; read the rest for that.

        Raises:
            UnknownOrderError: torch has not asked for the place of a storage.
            EOFError: the file has become shorter.
            OSError: it cannot be read.
        """
        if self._left:
            raise UnknownOrderError(f"torch.load has not asked where to load {self._left[0].entry.name!r:.100}")
        self._reader.wait()
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        contents = [part.content for part in self._parts if part.content is not None]
        for content in contents:
            while (rest := content.entry.size - content.checked) > 0:
                if not self._reader.read(content, content.checked, buffer[:rest]):
                    break
        return [content.entry.name for content in contents if not content.is_intact]

    def close(self) -> None:
        """End the threads that read and compute checksums; the file stays open."""
        if not self.closed:
            self._reader.close()
        super().close()
