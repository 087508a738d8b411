"""Looking through the pickles in a file of ``torch.save`` before torch reads them.

``torch.load(weights_only=True)`` runs no foreign code, but it believes what it is told: ``bytearray`` of ten billion, a
sparse tensor whose indices lead out of it, keys that take years to hash. :func:`screen` follows the same pickle with
descriptions in place of values, and lets only pass what ``torch.save`` writes.
"""

from __future__ import annotations

import io
import pathlib
import struct
import zipfile
from typing import IO

import torch

from det_lightning.checkpoint.pickle_screen import PickleScreen
from det_lightning.checkpoint.screened_calls import CALLS, NAMES

__all__ = ["ZIP_MAGIC", "screen"]

#: With these bytes a file begins that torch reads as a zip archive.
ZIP_MAGIC = b"PK\x03\x04"
# What torch.save wrote before 1.6 begins with these two pickles.
_OLD_MAGIC = 0x1950A86A20F9469CFC6C
_OLD_PROTOCOL = 1001


def screen(path: pathlib.Path, stand_ins: set[str]) -> None:
    """Raise unless ``torch.save`` can have written ``path``, or what follows is read in no time and little memory.

    Args:
        path: the file.
        stand_ins: names that are answered by functions which check what they are given.

    Raises:
        pickle.UnpicklingError: it refers to something that is not known to be safe.
        ValueError, and others: it is damaged, or made up.
    """
    believed = frozenset(stand_ins | _declared_safe()) - frozenset(CALLS)
    with path.open("rb") as file:
        is_zip = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
        file.seek(0)
        if is_zip:
            _screen_archive(file, path.stat().st_size, believed)
        else:
            _screen_old_format(file, path.stat().st_size, believed)


def _declared_safe() -> set[str]:
    declared = torch.serialization.get_safe_globals()
    names = {one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in declared}
    # torch declares its nested tensors safe, but checks nothing of what they are made of.
    return {name for name in names if not name.startswith(("torch.nested.", "torch._dynamo."))}


def _screen_archive(file: IO[bytes], size: int, believed: frozenset[str]) -> None:
    _require_plain_end(file, size)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        # torch does not tell capitals from small letters. A name that was cut off at a zero byte is another one to it.
        if len({entry.filename.lower() for entry in entries}) < len(entries) or any(
            entry.orig_filename != entry.filename or entry.compress_type != zipfile.ZIP_STORED for entry in entries
        ):
            raise ValueError("torch.save does not compress, and does not use a name twice")
        root = entries[0].filename.partition("/")[0]
        sizes = {entry.filename: entry.file_size for entry in entries}
        content = archive.read(f"{root}/data.pkl")
    PickleScreen(
        io.BytesIO(content),
        len(content),
        lambda key, nbytes: sizes.get(f"{root}/data/{key}") == nbytes,
        believed,
        CALLS,
        NAMES,
    ).run()


def _require_plain_end(file: IO[bytes], size: int) -> None:
    """Raise unless Python and torch take the same bytes for the list of entries."""
    file.seek(max(0, size - 22))
    end = file.read(22)
    if len(end) < 22 or end[:4] != b"PK\x05\x06" or end[20:] != b"\0\0":
        raise ValueError("the end of the archive is missing")
    listed, begin = struct.unpack("<II", end[12:20])
    if begin != 0xFFFFFFFF and listed != 0xFFFFFFFF and begin + listed not in (size - 22, size - 22 - 20 - 56):
        raise ValueError("the list of the archive's entries is not where it should be")


def _screen_old_format(file: IO[bytes], size: int, believed: frozenset[str]) -> None:
    claimed: set[str] = set()
    left = size

    def claim(key: str, nbytes: int) -> bool:
        nonlocal left
        claimed.add(key)
        left -= nbytes + 8  # before each there is its length
        return left >= 0

    if PickleScreen(file, size).run() != _OLD_MAGIC or PickleScreen(file, size).run() != _OLD_PROTOCOL:
        raise ValueError("it does not begin as torch.save lets it")
    PickleScreen(file, size).run()  # of the machine that wrote it
    PickleScreen(file, size, claim, believed, CALLS, NAMES).run()
    keys = PickleScreen(file, size).run()
    if type(keys) is not list or sorted(map(str, keys)) != sorted(claimed):
        raise ValueError("the tensors and their content do not belong together")
