"""Reading files of ``torch.save`` without running code in them.

``torch.load(weights_only=True)`` runs no foreign code, but it trusts sizes and counts: a ``bytearray`` of ten billion,
a sparse tensor whose indices lie outside it, keys that take years to hash. So the pickle is first interpreted with
descriptions in place of values, and only one that ``torch.save`` can have written passes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import pathlib
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import torch
from zlib_ng import zlib_ng

from det_lightning import errors, garbage_collection
from det_lightning.checkpoint.safe_load.allowed_calls import CALLS, NAMES, READ_VALUES
from det_lightning.checkpoint.safe_load.archive import Entry, PlainArchive, Stream, UnknownOrderError, read_entries
from det_lightning.checkpoint.safe_load.descriptions import CostlyError, require_bounded
from det_lightning.checkpoint.safe_load.pickle_interpreter import STORAGES, Interpreter
from det_lightning.checkpoint.safe_load.stand_ins import STAND_INS, allow_safe_values, finish
from det_lightning.escaping import escape, name_some

logger = logging.getLogger(__name__)

# Files of torch.save before 1.6 begin with these two pickles.
_OLD_MAGIC = 0x1950A86A20F9469CFC6C
_OLD_PROTOCOL = 1001


def _check_pickle(file: IO[bytes], size: int, claim: Callable[[str, int], bool]) -> bool:
    """Raise unless ``torch.save`` can have written the pickle in a file, or it is harmless anyway; see ``Interpreter``.

    Return whether unpickling it may read the values of tensors. An ``UnpicklingError`` names a reference that is not
    known to be safe; any other error means damage.
    """
    safe_names = _allowed_names()
    interpreter = Interpreter(file, size, claim, safe_names, CALLS, NAMES)
    require_bounded(interpreter.run())
    return not interpreter.named.isdisjoint(READ_VALUES | (safe_names - STAND_INS.keys()))


def _allowed_names() -> frozenset[str]:
    declared = torch.serialization.get_safe_globals()
    names = {one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in declared}
    # torch declares its nested tensors safe, but does not check their parts.
    safe = {name for name in names if not name.startswith(("torch.nested.", "torch._dynamo."))}
    return frozenset(safe.union(STAND_INS)) - frozenset(CALLS)


def is_known(name: str) -> bool:
    """Return whether a state file may refer to a name."""
    is_dtype = isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype)
    return is_dtype or any(name in names for names in (_allowed_names(), CALLS, NAMES, STORAGES))


def _check_old_format(file: IO[bytes], size: int) -> None:
    """Check a file of ``torch.save`` before 1.6, which has ``size`` bytes; see :func:`_check_pickle`."""
    claimed: set[str] = set()
    left = size

    def claim(key: str, nbytes: int) -> bool:
        nonlocal left
        claimed.add(key)
        left -= nbytes + 8  # each is preceded by its length
        return left >= 0

    if Interpreter(file, size).run() != _OLD_MAGIC or Interpreter(file, size).run() != _OLD_PROTOCOL:
        raise ValueError("it does not begin like a file of torch.save")
    Interpreter(file, size).run()  # describes the machine that wrote it
    _check_pickle(file, size, claim)
    keys = Interpreter(file, size).run()
    if type(keys) is not list or sorted(map(str, keys)) != sorted(claimed):
        raise ValueError("the tensors and their content do not belong together")


def warn_of_nan(state: Mapping[str, Any], source: str) -> None:
    """Log a warning that names the weights with NaN in a state, which any release may have written."""
    models = state.get("models_state_dict", [state.get("model_state_dict")])
    found = [
        f"{name} of model {index}"
        for index, weights in enumerate(models if isinstance(models, list) else [])
        if isinstance(weights, Mapping)
        for name, value in weights.items()
        if isinstance(value, torch.Tensor) and _has_nan(value)
    ]
    if found:
        names = name_some([f"{escape(name):.100}" for name in found])
        logger.warning("%s holds weights that are NaN: %s.", escape(source), names)


def _has_nan(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds NaN. Usually the sum, which takes no memory, shows that there is none."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    flat = tensor.detach()
    if flat.numel() * flat.element_size() > flat.untyped_storage().nbytes():
        return False  # it is expanded from fewer numbers
    if flat.element_size() == 1:  # torch does not compute with eight bits
        flat = flat.to(torch.float32)
    return bool(flat.sum().isnan()) and bool(flat.isnan().any())


# torch treats a file with these first bytes as a zip archive.
_ZIP_MAGIC = b"PK\x03\x04"
# In an archive of torch.save: the pickle, and the directory of the storages' content.
_PICKLE = "data.pkl"
_STORAGES = "data/"
# Other entries that torch reads. Any further one might make it treat the archive as a program.
_SMALL_ENTRIES = ("version", "byteorder")

# Messages of torch's reader about names that are not on its allow-list.
_UNSAFE = re.compile(
    r"Unsupported global: GLOBAL (?P<name>.+?)(?: was not|$)"
    r"|unsupported GLOBAL (?P<blocked>\S+)"
    r"|call reduce for unrecognized function (?P<called>.+)"
    r"|(?P<built>Can only (?:create new object|build) .+)",
    re.MULTILINE,
)


def read_state(
    path: pathlib.Path,
    *,
    trusted: bool = False,
    source: object = None,
    prepare: Callable[[bytes], bytes] | None = None,
    **torch_load_kwargs: Any,
) -> dict[str, Any]:
    """Read a dict that ``torch.save`` wrote, of tensors (by default to the CPU), numpy values and plain containers.

    If ``trusted``, unpickle anything, and run any code that the file asks for; otherwise other objects raise an
    ``UnsafeCheckpointError``. A damaged file raises an ``IncompleteCheckpointError``. Messages name ``source``, where
    the file was copied from. ``prepare`` is called with the pickle in an archive, and returns what is read instead.
    """
    source = path if source is None else source
    if path.exists() and not path.is_file():  # such as a pipe, whose writer it would wait for
        raise errors.IncompleteCheckpointError(f"{escape(source)} cannot be read: it is not a file.")
    kwargs = {"map_location": "cpu", "weights_only": not trusted, "mmap": False, **torch_load_kwargs}
    with _explaining(source), path.open("rb", buffering=0) as file:
        is_archive = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
        file.seek(0)
        if is_archive:
            with garbage_collection.paused():
                state = _read_archive(path, file, read_entries(file), kwargs, prepare)
        else:
            state = _read_old_format(path, file, kwargs)
    if not isinstance(state, dict):
        raise errors.IncompleteCheckpointError(
            f"{escape(source)} should hold a dict; it holds a {type(state).__name__}."
        )
    return state


def read_tensor_at(path: pathlib.Path, offset: int, length: int, *, trusted: bool = False) -> torch.Tensor:
    """Read a tensor that ``torch.save`` wrote to ``length`` bytes of a file from ``offset`` on; see `read_state`."""
    kwargs = {"map_location": "cpu", "weights_only": not trusted, "mmap": False}
    with _explaining(f"{path} at byte {offset:,}"), path.open("rb", buffering=0) as file:
        section: Any = _FileSection(file, offset, length)
        found = read_entries(section).items()
        entries = {name: dataclasses.replace(entry, begin=offset + entry.begin) for name, entry in found}
        tensor = _read_archive(path, file, entries, kwargs)
    if not isinstance(tensor, torch.Tensor):
        raise errors.IncompleteCheckpointError(
            f"{path} should hold a tensor at byte {offset:,}; it holds a {type(tensor).__name__}."
        )
    return tensor


class _FileSection(Stream):
    """A section of a file as a stream."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        super().__init__(length)
        size = file.seek(0, io.SEEK_END)
        if begin + length > size:
            raise ValueError(f"it has {size:,} bytes; the tensor should end at byte {begin + length:,}")
        self._file = file
        self._begin = begin

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._begin + self.position)
        room = memoryview(buffer)[: max(0, self.size - self.position)]
        count: int = self._file.readinto(room)  # type: ignore[attr-defined]  # of an unbuffered file
        self.position += count
        return count


def _load(source: Any, kwargs: dict[str, Any]) -> Any:
    with allow_safe_values():
        state = torch.load(source, **kwargs)
        return finish(state) if kwargs["weights_only"] else state


def _read_archive(
    path: pathlib.Path,
    file: IO[bytes],
    entries: Mapping[str, Entry],
    kwargs: dict[str, Any],
    prepare: Callable[[bytes], bytes] | None = None,
) -> Any:
    """Read the format of torch since 1.6, and compare the checksums, which torch does not."""
    pickled = _read_entry(file, entries, _PICKLE)
    if prepare is not None:
        pickled = prepare(pickled)
        entry = dataclasses.replace(entries[_PICKLE], size=len(pickled), crc32=zlib_ng.crc32(pickled))
        entries = {**entries, _PICKLE: entry}
    contents = {_PICKLE: pickled}
    fills_later = False
    if kwargs["weights_only"]:
        storages = {name: entry for name, entry in entries.items() if name.startswith(_STORAGES)}
        sizes = {name.removeprefix(_STORAGES): entry.size for name, entry in storages.items()}
        reads_values = _check_pickle(io.BytesIO(pickled), len(pickled), lambda key, nbytes: sizes.get(key) == nbytes)
        contents |= {name: _read_entry(file, entries, name) for name in _SMALL_ENTRIES if name in entries}
        entries = {name: entries[name] for name in contents} | storages
        # torch loads the content of storages unchanged if they stay on the CPU.
        is_native = contents.get("byteorder", b"little") == sys.byteorder.encode()
        stays = is_native and not kwargs["mmap"] and kwargs["map_location"] in ("cpu", torch.device("cpu"))
        fills_later = stays and not reads_values
    if fills_later:
        with PlainArchive(file, entries, contents, fills_later=True) as archive:
            try:
                return _load_intact(archive, archive, {**kwargs, "map_location": archive.fill})
            except UnknownOrderError as e:
                logger.debug("Tensors are read one after another: %s.", e)
    with PlainArchive(file, entries, contents, fills_later=False) as archive:
        # Mapping into memory needs the file itself, which was found to be unambiguous.
        return _load_intact(archive, path if kwargs["mmap"] else archive, kwargs)


def _load_intact(archive: PlainArchive, source: Any, kwargs: dict[str, Any]) -> Any:
    state = _load(source, kwargs)
    if damaged := archive.find_damage():
        raise ValueError(f"checksums of {len(damaged):,} entries differ, such as that of {damaged[0]!r:.100}")
    return state


def _read_entry(file: IO[bytes], entries: Mapping[str, Entry], name: str) -> bytes:
    entry = entries.get(name)
    if entry is None:
        raise ValueError(f"it holds no {name}")
    file.seek(entry.begin)
    content = file.read(entry.size)
    if len(content) < entry.size or zlib_ng.crc32(content) != entry.crc32:
        raise ValueError(f"the checksum of {name} differs")
    return content


def _read_old_format(path: pathlib.Path, file: IO[bytes], kwargs: dict[str, Any]) -> Any:
    """Read a format of torch before 1.6. It has no checksums."""
    if not kwargs["weights_only"]:
        return _load(path, kwargs)
    # A stream without a descriptor: torch tries other formats on a real file.
    stream = io.BufferedReader(_FileSection(file, 0, path.stat().st_size))
    _check_old_format(stream, path.stat().st_size)
    stream.seek(0)
    return _load(stream, kwargs)


@contextlib.contextmanager
def _explaining(where: object) -> Iterator[None]:
    """Turn whatever reading a file raises in the block into a ``CheckpointError``."""
    try:
        yield
    except errors.CheckpointError:
        raise
    except Exception as e:  # reading damaged bytes may raise anything
        raise _explain(e, escape(where)) from e


def _explain(error: Exception, source: str) -> errors.CheckpointError:
    if isinstance(error, CostlyError):
        return errors.UnsafeCheckpointError(
            f"{source} is refused, because reading it could take far more memory or time than its size suggests: "
            f"{error}. If you know where the file comes from, pass trusted=True."
        )
    unsafe = _UNSAFE.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if unsafe is not None:
        name = unsafe["name"] or unsafe["blocked"] or unsafe["called"]
        refers_to = (
            f"refers to {escape(name)}, and reading that"
            if name
            else f"holds objects ({escape(unsafe['built'])}); reading them"
        )
        return errors.UnsafeCheckpointError(
            f"{source} {refers_to} could run code. If you know where the file comes from, pass trusted=True."
        )
    first_line = escape(str(error).partition("\n")[0]) or type(error).__name__
    return errors.IncompleteCheckpointError(
        f"{source} cannot be read, it is damaged or holds Python objects: {first_line:.500}. If it should hold objects "
        "and you know where it comes from, pass trusted=True."
    )
