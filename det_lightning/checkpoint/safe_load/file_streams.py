"""A file, or some bytes of one, as a stream without a descriptor."""

from __future__ import annotations

import io
from typing import IO, Any


class FileStream(io.RawIOBase):
    """The bytes of a file, without its descriptor: torch tries other formats on a file of the system."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.readinto(buffer)  # type: ignore[attr-defined]  # of an unbuffered file
        return count


class FileSection(FileStream):
    """Some bytes of a file, as a file of their own."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        size = file.seek(0, io.SEEK_END)
        if begin + length > size:
            raise ValueError(f"it has {size:,} bytes; the tensor should end at byte {begin + length:,}")
        super().__init__(file)
        self._begin = begin
        self._length = length
        self._position = 0

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        super().seek(self._begin + self._position)
        room = memoryview(buffer)[: max(0, self._length - self._position)]
        count = super().readinto(room)
        self._position += count
        return count
