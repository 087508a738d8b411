"""Reads files of ``torch.save`` without running code in them: we check first, then torch reads.

``torch.load(weights_only=True)`` calls only functions on a list, but on more lists than ours; and torch compares no
checksums. So the archive and the names in the pickle are checked first, and torch reads what was checked.

Python and torch find the entries of an archive by different rules, and a forged archive can show each a different list.
So the entries are looked up once, and torch gets an archive of exactly these, with checked content.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import gc
import io
import itertools
import pathlib
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

import torch
from fastcrc.crc32 import iso_hdlc as extend_crc32

from det_lightning import errors
from det_lightning.checkpoint.safe_load.pickle_scanner import UnsafeReference, scan_pickle
from det_lightning.checkpoint.safe_load.safe_globals import allow_safe_values, finish

# torch treats a file with these first bytes as a zip archive.
_ZIP_MAGIC = b"PK\x03\x04"
# In an archive of torch.save: the pickle, the directory of the storages' content, and what else torch reads.
_PICKLE = "data.pkl"
_STORAGES = "data/"
_SMALL_ENTRIES = ("version", "byteorder")
# Files of torch.save before 1.6 have so many pickles in a row; the last but one is the state, the last lists storages.
_OLD_PICKLES = 5

_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCAL = struct.Struct("<4s5H3I2H")
_LOCATOR_MAGIC = b"PK\x06\x07"

# The checksum of a chunk is computed while the chunk is in the processor's cache.
_CHUNK_BYTES = 256 * 1024

# The reason in a message of torch's reader, which is long and says how to turn safety off.
_REASON = re.compile(r"WeightsUnpickler error:\s*(?P<reason>\S.*)|(?P<blocked>Trying to load unsupported GLOBAL .+)")


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A file in an archive: the path below the archive's directory, and position, size and checksum of the content.

    The checksum is None in an archive without checksums.
    """

    name: str
    begin: int
    size: int
    crc32: int | None


class _Stream(io.RawIOBase):
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


class _Section(_Stream):
    """A section of an open file, by default all of it, as a stream without a descriptor."""

    def __init__(self, file: IO[bytes], begin: int = 0, length: int | None = None) -> None:
        size = file.seek(0, io.SEEK_END)
        super().__init__(size - begin if length is None else length)
        if begin + self.size > size:
            raise EOFError(f"it has {size:,} bytes; expected at least {begin + self.size:,}")
        self._file = file
        self._begin = begin

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")[: max(0, self.size - self.position)]
        self._file.seek(self._begin + self.position)
        count: int = self._file.readinto(target)  # type: ignore[attr-defined]  # of an open binary file
        self.position += count
        return count

    def fill(self, position: int, target: memoryview, crc32: int = 0) -> int:
        """Fill ``target`` from a position on; return the checksum ``crc32`` extended by the bytes read.

        Raises:
            EOFError: the file ends before.
        """
        self.seek(position)
        while len(target):
            count = self.readinto(target[:_CHUNK_BYTES])
            if not count:
                raise EOFError("it ends in the middle of an entry")
            crc32 = extend_crc32(target[:count], crc32)
            target = target[count:]
        return crc32

    def checksum(self, entry: _Entry) -> int:
        """Return the checksum of the content of an entry without keeping the content."""
        crc32 = 0
        buffer = memoryview(bytearray(min(entry.size, _CHUNK_BYTES)))
        for at in range(0, entry.size, _CHUNK_BYTES):
            crc32 = self.fill(entry.begin + at, buffer[: entry.size - at], crc32)
        return crc32


def _read_entries(file: _Section) -> dict[str, _Entry]:
    """Return the entries of an archive by name."""
    directory = _find_directory(file)
    with zipfile.ZipFile(file) as archive:
        listed = archive.infolist()
    if len({entry.filename.lower() for entry in listed}) < len(listed):  # torch ignores case
        raise ValueError("torch.save does not use a name twice")
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size for entry in listed):
        unpacked = sum(entry.file_size for entry in listed)
        raise ValueError(f"it has {file.size:,} bytes and declares {unpacked:,}; torch.save compresses nothing")
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
    if not any(entry.crc32 for entry in entries.values()):  # after torch.serialization.set_crc32_options(False)
        entries = {name: dataclasses.replace(entry, crc32=None) for name, entry in entries.items()}
    return entries


def _find_directory(file: _Section) -> int:
    """Return the position of the list of entries, if the end of the archive holds exactly one list."""
    size = _END_64.size + _LOCATOR.size + _END.size
    file.seek(max(0, file.size - size))
    tail = file.read(size).rjust(size, b"\0")
    *head, count, length, begin, comment = _END.unpack(tail[-_END.size :])
    if head != [b"PK\x05\x06", 0, 0, count] or comment:
        raise ValueError("the end of the archive is not one of torch.save")
    end = file.size - _END.size
    locator = tail[_END_64.size : -_END.size]
    if locator.startswith(_LOCATOR_MAGIC):  # and the record for large archives in front, whose version means nothing
        end = file.size - size
        small = (count, length, begin)
        magic, record_size, _, _, *disks, count, length, begin = _END_64.unpack(tail[: _END_64.size])
        if (
            (magic, record_size, disks) != (b"PK\x06\x06", _END_64.size - 12, [0, 0, count])
            or locator != _LOCATOR.pack(_LOCATOR_MAGIC, 0, end, 1)
            or small not in itertools.product((count, 0xFFFF), (length, 0xFFFFFFFF), (begin, 0xFFFFFFFF))
        ):
            raise ValueError("the archive has two lists of its entries, and they differ")
    if begin + length != end:
        raise ValueError("the list of the archive's entries is not where it should be")
    return int(begin)


def _locate(file: _Section, found: zipfile.ZipInfo) -> _Entry:
    """Return a listed entry with the position of its content; raise unless the header before it agrees."""
    file.seek(found.header_offset)
    header = file.read(_LOCAL.size)
    if len(header) < _LOCAL.size:
        raise ValueError(f"the entry {found.filename!r:.100} lies outside of the archive")
    magic, _, flags, *_, name_length, extra_length = _LOCAL.unpack(header)
    name = file.read(name_length)
    listed = found.orig_filename.encode("utf-8" if flags & 0x800 else "cp437", "replace")
    if magic != b"PK\x03\x04" or name != listed:
        raise ValueError(f"the entry {found.filename!r:.100} differs from the archive's list")
    begin = found.header_offset + _LOCAL.size + name_length + extra_length
    return _Entry(found.filename.partition("/")[2], begin, found.file_size, found.CRC)


def _read_entry(file: _Section, entry: _Entry) -> bytes:
    """Return the content of an entry; raise a ``ValueError`` if the checksum differs."""
    content = bytearray(entry.size)
    if entry.crc32 not in (None, file.fill(entry.begin, memoryview(content))):
        raise ValueError(f"the checksum of its entry {entry.name!r:.100} differs")
    return bytes(content)


class _Parts(_Stream):
    """A stream of bytes, and of entries whose content is read from ``file`` when needed."""

    def __init__(self, file: _Section, parts: Iterable[bytes | _Entry] = ()) -> None:
        super().__init__(size=0)
        self.file = file
        self.crc32s: dict[str, int] = {}  # of entries that were read whole
        self._parts: list[bytes | _Entry] = []  # an entry stands for the content in the file
        self._begins: list[int] = []
        for part in parts:
            self.write(part)
        self.position = 0

    def write(self, part: Any) -> int:
        """Append bytes, or the content of an entry."""
        size: int = part.size if isinstance(part, _Entry) else len(part)
        if size:
            self._parts.append(part)
            self._begins.append(self.size)
            self.size += size
        self.position = self.size
        return size

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        done = 0
        while done < len(target) and self.position < self.size:
            count = self._read_part(target[done:])
            done += count
            self.position += count
        return done

    def _read_part(self, target: memoryview) -> int:
        """Fill ``target`` from the part at the current position; return the number of bytes found there."""
        index = bisect.bisect_right(self._begins, self.position) - 1
        part = self._parts[index]
        offset = self.position - self._begins[index]
        if isinstance(part, bytes):
            found = part[offset : offset + len(target)]
            target[: len(found)] = found
            return len(found)
        count = min(len(target), part.size - offset)
        crc32 = self.file.fill(part.begin + offset, target[:count])
        if count == part.size:  # as torch reads the content of a storage
            self.crc32s[part.name] = crc32
        return count


class _CheckedArchive(_Parts):
    """An archive with the given ``contents``, and with ``entries``, whose content torch reads from the file.

    The checksums of everything that torch reads are computed meanwhile, and compared by :meth:`find_damage`.
    """

    def __init__(self, file: _Section, entries: Mapping[str, _Entry], contents: Mapping[str, bytes]) -> None:
        super().__init__(file)
        self._entries = entries
        parts: dict[str, bytes | _Entry] = {**contents, **entries}
        with zipfile.ZipFile(self, "w") as archive:
            for name, part in parts.items():
                info = zipfile.ZipInfo(f"archive/{name}")
                info.header_offset = self.size
                info.file_size = info.compress_size = part.size if isinstance(part, _Entry) else len(part)
                info.CRC = 0  # which torch does not compare
                self.write(info.FileHeader())
                self.write(part)
                archive.filelist.append(info)
            archive.start_dir = self.size
        self.position = 0

    def find_damage(self) -> list[str]:
        """Return the names of the entries whose checksum differs; read entries first that torch did not read."""
        for name in self._entries.keys() - self.crc32s.keys():
            self.crc32s[name] = self.file.checksum(self._entries[name])
        return [name for name, entry in self._entries.items() if entry.crc32 not in (None, self.crc32s[name])]


def read_state(
    source: pathlib.Path | IO[bytes],
    *,
    trusted: bool = False,
    name: object = None,
    prepare: Callable[[bytes], bytes] | None = None,
    **torch_load_kwargs: Any,
) -> dict[str, Any]:
    """Read a dict from a file of ``torch.save``: tensors (by default on the CPU), numpy values and plain containers.

    If ``trusted``, unpickle anything, and run any code that the file asks for; otherwise other objects raise an
    ``UnsafeCheckpointError``. A damaged file raises an ``IncompleteCheckpointError``. Messages name the ``source``, a
    path or an open file, by ``name``. ``mmap=True`` has no effect: rewriting a mapped file ends the process.
    ``prepare`` gets the pickle of the state, and returns the pickle to read.
    """
    name = source if name is None else name
    with _open(source, name, trusted) as file:
        kwargs = {"map_location": "cpu", "weights_only": not trusted, **torch_load_kwargs, "mmap": False}
        state = _read(_Section(file), kwargs, prepare)
    if not isinstance(state, dict):
        raise errors.IncompleteCheckpointError(f"{name} must hold a dict; got a {type(state).__name__}.")
    return state


def read_tensor_at(path: pathlib.Path, offset: int, length: int, *, trusted: bool = False) -> torch.Tensor:
    """Read a tensor of ``torch.save`` from ``length`` bytes of a file at ``offset``; see `read_state`."""
    with _open(path, f"{path} at byte {offset:,}", trusted) as file:
        kwargs = {"map_location": "cpu", "weights_only": not trusted, "mmap": False}
        tensor = _read(_Section(file, offset, length), kwargs)
    if not isinstance(tensor, torch.Tensor):
        raise errors.IncompleteCheckpointError(
            f"{path} must hold a tensor at byte {offset:,}; got a {type(tensor).__name__}."
        )
    return tensor


@contextlib.contextmanager
def _open(source: pathlib.Path | IO[bytes], name: object, trusted: bool) -> Iterator[IO[bytes]]:
    """Yield a file, open; turn any error while reading into a ``CheckpointError`` that names the file."""
    try:
        if not isinstance(source, pathlib.Path):
            yield source
            return
        if source.exists() and not source.is_file():  # such as a pipe, whose writer it would wait for
            raise errors.IncompleteCheckpointError(f"{name} cannot be read: it is not a file.")
        with source.open("rb", buffering=0) as file:
            yield file
    except errors.CheckpointError:
        raise
    except Exception as e:  # reading damaged bytes may raise anything
        raise _explain(e, str(name), trusted) from e


def _read(file: _Section, kwargs: dict[str, Any], prepare: Callable[[bytes], bytes] | None = None) -> Any:
    # A stream without a descriptor: torch tries other formats on a real file.
    stream: io.BufferedReader[Any] = io.BufferedReader(file)
    if stream.peek().startswith(_ZIP_MAGIC):
        was_enabled = gc.isenabled()
        gc.disable()  # it would look through everything again and again, for a quarter of the time
        try:
            return _read_archive(file, kwargs, prepare)
        finally:
            if was_enabled:
                gc.enable()
    if prepare is not None:
        stream = io.BufferedReader(_prepare_old_format(file, stream, prepare))
    if kwargs["weights_only"]:
        _scan_old_format(stream, file.size)
    stream.seek(0)
    return _load(stream, kwargs)


def _prepare_old_format(file: _Section, stream: IO[bytes], prepare: Callable[[bytes], bytes]) -> _Parts:
    """Return a file of ``torch.save`` before 1.6, read through ``stream``, with the pickle of the state prepared."""
    begin = end = 0
    for _ in range(_OLD_PICKLES - 1):
        begin = end
        collections.deque(pickletools.genops(stream), maxlen=0)
        end = stream.tell()
    stream.seek(0)
    head = stream.read(end)
    return _Parts(file, [head[:begin] + prepare(head[begin:]), _Entry("the rest", end, file.size - end, None)])


def _read_archive(file: _Section, kwargs: dict[str, Any], prepare: Callable[[bytes], bytes] | None) -> Any:
    entries = _read_entries(file)
    if _PICKLE not in entries:
        raise ValueError(f"it holds no {_PICKLE}")
    storages = {name: entry for name, entry in entries.items() if name.startswith(_STORAGES)}
    contents = {name: _read_entry(file, entry) for name, entry in entries.items() if name not in storages}
    if prepare is not None:
        contents[_PICKLE] = prepare(contents[_PICKLE])
    if kwargs["weights_only"]:
        sizes = {name.removeprefix(_STORAGES): entry.size for name, entry in storages.items()}
        scan_pickle(io.BytesIO(contents[_PICKLE]), len(contents[_PICKLE]), sizes.items().__contains__)
        # Any further entry might make torch treat the archive as a program.
        contents = {name: contents[name] for name in (_PICKLE, *_SMALL_ENTRIES) if name in contents}
    archive = _CheckedArchive(file, storages, contents)
    try:
        return _load(archive, kwargs)
    finally:
        if damaged := archive.find_damage():
            raise ValueError(f"checksums of {len(damaged):,} entries differ, such as that of {damaged[0]!r:.100}")


def _scan_old_format(stream: io.BufferedReader[Any], size: int) -> None:
    """Check a file of ``torch.save`` before 1.6, with ``size`` bytes and without checksums."""
    claimed: set[str] = set()
    left = size

    def claim(stored: tuple[str, int]) -> bool:
        nonlocal left
        key, nbytes = stored
        left -= nbytes + 8 if key not in claimed else 0  # each is preceded by its length
        claimed.add(key)
        return nbytes >= 0 and left >= 0

    texts = [scan_pickle(stream, size, claim) for _ in range(_OLD_PICKLES)]
    if sorted(texts[-1]) != sorted(claimed):
        raise ValueError("the tensors and their content do not belong together")


def _load(source: Any, kwargs: dict[str, Any]) -> Any:
    if not kwargs["weights_only"]:
        return torch.load(source, **kwargs)
    with allow_safe_values():
        return finish(torch.load(source, **kwargs))


def _explain(error: Exception, source: str, trusted: bool) -> errors.CheckpointError:
    first_line = str(error).partition("\n")[0] or type(error).__name__
    if trusted:
        return errors.IncompleteCheckpointError(
            f"{source} cannot be read, because the file is damaged or a class in the file cannot be imported: "
            f"{first_line:.500}."
        )
    trust = "if you know where the file comes from, pass trusted=True"
    if isinstance(error, UnsafeReference):
        name = error.args[0]
        declare = "If it is harmless, declare it with torch.serialization.add_safe_globals(); "
        way_out = trust[0].upper() + trust[1:] if name.startswith("torch.") else f"{declare}{trust}"
        return errors.UnsafeCheckpointError(
            f"{source} refers to {name:.200}, so reading the file could run code. {way_out}."
        )
    if isinstance(error, pickle.UnpicklingError):
        found = _REASON.search(str(error))
        reason = (found["reason"] or found["blocked"]) if found else str(error).strip().partition("\n")[0]
        return errors.UnsafeCheckpointError(
            f"{source} holds an object that cannot be read safely: {reason:.300}. Save plain values instead; or "
            f"{trust}."
        )
    return errors.IncompleteCheckpointError(
        f"{source} cannot be read, because the file is damaged or holds Python objects: {first_line:.500}. If you "
        "expect objects and know where the file comes from, pass trusted=True."
    )
