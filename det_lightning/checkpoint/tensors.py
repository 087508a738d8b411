"""Reading the files that ``torch.save`` wrote, without running what they carry."""

from __future__ import annotations

import pathlib
import pickle
import re
import zipfile
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.safe_values import STAND_INS, allow_safe_values, finish
from det_lightning.checkpoint.screening import screen

__all__ = ["read_state"]

# What torch's reader says of things that are not on its list.
_UNSAFE = re.compile(
    r"Unsupported global: GLOBAL (?P<name>.+?)(?: was not|$)"
    r"|unsupported GLOBAL (?P<blocked>\S+)"
    r"|(?P<call>call reduce for unrecognized function .+|Can only (?:create new object|build) .+)",
    re.MULTILINE,
)
_CHUNK_BYTES = 16 * 1024 * 1024


def read_state(path: pathlib.Path, *, trusted: bool = False, **torch_load_kwargs: Any) -> dict[str, Any]:
    """Read a file that ``torch.save`` wrote: tensors, numpy values and plain Python containers.

    Args:
        path: the file.
        trusted: unpickle anything, running whatever code the file asks for.
        **torch_load_kwargs: arguments of ``torch.load``; tensors go to the CPU by default.

    Raises:
        UnsafeCheckpointError: the file refers to other things and is not ``trusted``.
        IncompleteCheckpointError: the file is damaged or holds no dict.
    """
    kwargs = {"map_location": "cpu", "weights_only": not trusted, **torch_load_kwargs}
    try:
        _require_whole_archive(path)
        if kwargs["weights_only"]:
            screen(path, STAND_INS)
        with allow_safe_values():
            state = torch.load(path, **kwargs)
            if kwargs["weights_only"]:
                state = finish(state)
    except errors.CheckpointError:
        raise
    except Exception as e:  # reading damaged bytes may raise anything
        raise _explain(e, path) from e
    if not isinstance(state, dict):
        raise errors.IncompleteCheckpointError(f"{path} should hold a dict; it holds a {type(state).__name__}.")
    return state


def _require_whole_archive(path: pathlib.Path) -> None:
    """Raise if ``path`` is a zip archive, which torch writes since 1.6, and is damaged.

    torch itself reads on over a wrong checksum, and unpacks whatever size an archive promises.
    """
    if not zipfile.is_zipfile(path):
        return
    file_size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        promised = sum(entry.file_size for entry in archive.infolist())
        if promised > file_size:
            raise errors.IncompleteCheckpointError(
                f"{path} has {file_size:,} bytes and promises {promised:,}; torch.save compresses nothing. It is "
                "damaged, or made to fill the memory."
            )
        for entry in archive.infolist():
            with archive.open(entry) as record:
                while record.read(_CHUNK_BYTES):
                    pass  # the archive compares the checksum when it has seen the last byte


def _explain(error: Exception, path: pathlib.Path) -> errors.CheckpointError:
    refers_to = _UNSAFE.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if refers_to is not None:
        return errors.UnsafeCheckpointError(
            f"{path} refers to {refers_to['name'] or refers_to['blocked'] or refers_to['call']}, and reading that "
            "could run code. If you know where the file comes from, pass trusted=True."
        )
    first_line = str(error).partition("\n")[0] or type(error).__name__
    return errors.IncompleteCheckpointError(
        f"{path} can not be read, it is damaged or holds Python objects: {first_line}. If it should hold objects and "
        "you know where it comes from, pass trusted=True."
    )
