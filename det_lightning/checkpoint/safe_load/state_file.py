"""Reading files of ``torch.save`` without running code in them: we look first, then torch reads.

``torch.load(weights_only=True)`` calls only functions on a list, but on more lists than ours; and torch compares no
checksums. So the archive and the names in the pickle are checked first, and torch reads the checked bytes.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import io
import pathlib
import pickle
import pickletools
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import IO, Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.manifest import digest_file
from det_lightning.checkpoint.safe_load.archive import CheckedArchive, Entry, Parts, Section, read_entries, read_entry
from det_lightning.checkpoint.safe_load.pickle_scanner import UnsafeReference, scan_pickle
from det_lightning.checkpoint.safe_load.safe_globals import allow_safe_values, finish
from det_lightning.escaping import get_logger, name_some

logger = get_logger(__name__)

# torch treats a file with these first bytes as a zip archive.
_ZIP_MAGIC = b"PK\x03\x04"
# In an archive of torch.save: the pickle, the directory of the storages' content, and what else torch reads.
_PICKLE = "data.pkl"
_STORAGES = "data/"
_SMALL_ENTRIES = ("version", "byteorder")
# Files of torch.save before 1.6 have so many pickles in a row; the last but one is the state, the last lists storages.
_OLD_PICKLES = 5

# The reason in a message of torch's reader, which is long and says how to turn safety off.
_REASON = re.compile(r"WeightsUnpickler error:\s*(?P<reason>\S.*)|(?P<blocked>Trying to load unsupported GLOBAL .+)")


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
        state = _read(Section(file), kwargs, prepare)
    if not isinstance(state, dict):
        raise errors.IncompleteCheckpointError(f"{name} must hold a dict; got a {type(state).__name__}.")
    return state


def read_tensor_at(path: pathlib.Path, offset: int, length: int, *, trusted: bool = False) -> torch.Tensor:
    """Read a tensor of ``torch.save`` from ``length`` bytes of a file at ``offset``; see `read_state`."""
    with _open(path, f"{path} at byte {offset:,}", trusted) as file:
        kwargs = {"map_location": "cpu", "weights_only": not trusted, "mmap": False}
        tensor = _read(Section(file, offset, length), kwargs)
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


def _read(file: Section, kwargs: dict[str, Any], prepare: Callable[[bytes], bytes] | None = None) -> Any:
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


def _prepare_old_format(file: Section, stream: IO[bytes], prepare: Callable[[bytes], bytes]) -> Parts:
    """Return a file of ``torch.save`` before 1.6, read through ``stream``, with the pickle of the state prepared."""
    begin = end = 0
    for _ in range(_OLD_PICKLES - 1):
        begin = end
        collections.deque(pickletools.genops(stream), maxlen=0)
        end = stream.tell()
    stream.seek(0)
    head = stream.read(end)
    return Parts(file, [head[:begin] + prepare(head[begin:]), Entry("the rest", end, file.size - end, None)])


def _read_archive(file: Section, kwargs: dict[str, Any], prepare: Callable[[bytes], bytes] | None) -> Any:
    entries = read_entries(file)
    if _PICKLE not in entries:
        raise ValueError(f"it holds no {_PICKLE}")
    storages = {name: entry for name, entry in entries.items() if name.startswith(_STORAGES)}
    contents = {name: read_entry(file, entry) for name, entry in entries.items() if name not in storages}
    if prepare is not None:
        contents[_PICKLE] = prepare(contents[_PICKLE])
    if kwargs["weights_only"]:
        sizes = {name.removeprefix(_STORAGES): entry.size for name, entry in storages.items()}
        scan_pickle(io.BytesIO(contents[_PICKLE]), len(contents[_PICKLE]), lambda key, nbytes: sizes.get(key) == nbytes)
        # Any further entry might make torch treat the archive as a program.
        contents = {name: contents[name] for name in (_PICKLE, *_SMALL_ENTRIES) if name in contents}
    archive = CheckedArchive(file, storages, contents)
    try:
        return _load(archive, kwargs)
    finally:
        if damaged := archive.find_damage():
            raise ValueError(f"checksums of {len(damaged):,} entries differ, such as that of {damaged[0]!r:.100}")


def _scan_old_format(stream: io.BufferedReader[Any], size: int) -> None:
    """Check a file of ``torch.save`` before 1.6, with ``size`` bytes and without checksums."""
    claimed: set[str] = set()
    left = size

    def claim(key: str, nbytes: int) -> bool:
        nonlocal left
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


def warn_of_nan(state: Mapping[str, Any], source: str) -> None:
    """Log a warning that names the weights with NaN in a state of any release."""
    models = state.get("models_state_dict", [state.get("model_state_dict")])
    found = [
        f"{name} of model {index}"
        for index, weights in enumerate(models if isinstance(models, list) else [])
        if isinstance(weights, Mapping)
        for name, value in weights.items()
        if isinstance(value, torch.Tensor) and _has_nan(value)
    ]
    if found:
        names = name_some([f"{name:.100}" for name in found])
        logger.warning("%s holds weights that are NaN: %s.", source, names)


def _has_nan(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds NaN. Usually the sum, computed without extra memory, shows that there is none."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    flat = tensor.detach()
    if flat.numel() * flat.element_size() > flat.untyped_storage().nbytes():
        return False  # it is expanded from fewer numbers, perhaps to more than can be added up in a lifetime
    try:
        if flat.element_size() == 1:  # torch does not compute with eight bits
            flat = flat.to(torch.float32)
        return bool(flat.sum().isnan()) and bool(flat.isnan().any())
    except RuntimeError:  # for types with which torch does not compute at all, such as complex32
        return False


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


def read_known_state(path: pathlib.Path, *, trusted: bool = False, recorded: Collection[str] = ()) -> dict[str, Any]:
    """Read a state file as ``read_state`` does; trust a refused file if ``recorded`` holds the file's SHA-256.

    An experiment records the SHA-256 when its trial writes a file, and so may trust the same bytes later.
    """
    try:
        return read_state(path, trusted=trusted)
    except errors.CheckpointError as refused:
        try:
            state = _read_recorded(path, recorded) if recorded else None
        except OSError as e:
            logger.warning("The objects in %s are not read, because the file cannot be copied: %s.", path, e)
            raise refused from e
        if state is None:
            raise
        return state


def _read_recorded(path: pathlib.Path, recorded: Collection[str]) -> dict[str, Any] | None:
    """Return the state in a file, with objects, if ``recorded`` holds the SHA-256; None for any other file."""
    if digest_file(path) not in recorded:
        return None
    # Nobody else can change the copy after its digest is known.
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as folder:
        copy = pathlib.Path(folder, path.name)
        shutil.copyfile(path, copy)
        if digest_file(copy) not in recorded:
            return None
        logger.info("The objects in %s are read, because the file is as this trial wrote it.", path)
        return read_state(copy, trusted=True, name=path)
