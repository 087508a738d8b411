"""Sharded checkpoints: the index of each rank's file, which torch names and writes, and the names of the tensors.

``shards/state.pth`` and ``resume.pth`` have tensors on the meta device in place of the sharded tensors. The values are
in files of ``torch.distributed.checkpoint``, one per rank. An *index* per rank, in JSON, says where in the file each
value is. torch's own ``.metadata`` is a pickle, and is never read here.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.layout import SHARDS_DIR, read_json
from det_lightning.masking import short_text

#: The first part of the names of tensors in a state, and in a resume state.
STATE_ROOT = "state"
RESUME_ROOT = "resume"
#: The values of a resume state that may be sharded.
SHARDED_RESUME_VALUES = ("gradients", "precision")

_INDEX_VERSION = 1
_INDEX_FILES = "index-*.json"
_FILE_NAME = re.compile(r"__\d+_\d+\.distcp", re.ASCII)
# The number of parts named in a message.
_MOST_NAMED_PARTS = 5


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """Where ``size`` rows of a tensor's dimension ``dim`` are stored: in ``length`` bytes of a file in ``shards/``."""

    dim: int
    begin: int
    size: int
    file: str
    offset: int
    length: int


def map_tensors(value: Any, convert: Callable[[str, Any], Any], name: str, kind: type) -> Any:
    """Return nested dicts, lists and tuples with ``convert(name, value)`` in place of each value of ``kind``.

    A name is the path to a value, such as ``"state.models_state_dict.0.weight"``.
    """
    if isinstance(value, kind):
        return convert(name, value)
    if isinstance(value, dict):
        return {key: map_tensors(item, convert, f"{name}.{key}", kind) for key, item in value.items()}
    if isinstance(value, list):
        return [map_tensors(item, convert, f"{name}.{index}", kind) for index, item in enumerate(value)]
    if type(value) is tuple:
        return tuple(map_tensors(item, convert, f"{name}.{index}", kind) for index, item in enumerate(value))
    return value


def index_file(rank: int) -> str:
    """Return the path of a rank's index in a checkpoint."""
    return f"{SHARDS_DIR}/index-{rank:05}.json"


def write_index(path: pathlib.Path, parts: Mapping[str, StoredPart]) -> None:
    """Write a rank's index: the position of each part."""
    rows = {name: dataclasses.astuple(part) for name, part in parts.items()}
    path.write_text(json.dumps({"version": _INDEX_VERSION, "parts": rows}), encoding="utf-8")


def index_files(directory: pathlib.Path) -> list[str]:
    """Return the paths of all ranks' indexes in a checkpoint."""
    return sorted(path.relative_to(directory).as_posix() for path in (directory / SHARDS_DIR).glob(_INDEX_FILES))


def part_files(directory: pathlib.Path) -> list[str]:
    """Return the paths of the files with parts of tensors in a checkpoint; see :func:`read_indexes`."""
    files = {part.file for parts in read_indexes(directory).values() for part in parts}
    return [f"{SHARDS_DIR}/{file}" for file in sorted(files)]


def read_indexes(directory: pathlib.Path) -> dict[str, list[StoredPart]]:
    """Return the positions of all parts of each tensor of a sharded checkpoint.

    Raise an ``IncompleteCheckpointError`` if an index is damaged, or there is none.
    """
    names = index_files(directory)
    if not names:
        raise errors.IncompleteCheckpointError(
            f"{directory / SHARDS_DIR} has no {_INDEX_FILES}: only sharded checkpoints of det_lightning can be "
            "read without running code in the files. For other checkpoints, use "
            "torch.distributed.checkpoint.format_utils."
        )
    found: dict[str, list[StoredPart]] = {}
    for name in names:
        path = directory / name
        content = read_json(path)
        if content.get("version") != _INDEX_VERSION:
            raise errors.IncompleteCheckpointError(
                f"{path} has version {short_text(content.get('version'))}; this release of det_lightning reads "
                f"version {_INDEX_VERSION}. The file is damaged, or of a newer release."
            )
        rows = content.get("parts")
        if not isinstance(rows, dict):
            raise errors.IncompleteCheckpointError(
                f"{path} is damaged: 'parts' must be an object; got {short_text(rows)}."
            )
        for tensor, row in rows.items():
            found.setdefault(tensor, []).append(_parse_row(row, tensor, path))
    _require_room(found, directory)
    return found


def _require_room(found: Mapping[str, list[StoredPart]], directory: pathlib.Path) -> None:
    """Raise if a file is smaller than its parts together: many names for the same bytes would fill the memory."""
    claimed: dict[str, int] = {}
    for part in (part for parts in found.values() for part in parts):
        claimed[part.file] = claimed.get(part.file, 0) + part.length
    for name, length in claimed.items():
        path = directory / SHARDS_DIR / name
        size = path.stat().st_size if path.is_file() else -1
        if size < length:
            raise errors.IncompleteCheckpointError(
                f"{path} must be a file of at least {length:,} bytes; got {max(size, 0):,}. The file is "
                "missing or damaged. Use another checkpoint."
            )


def _parse_row(row: Any, tensor: str, path: pathlib.Path) -> StoredPart:
    form = [field.name for field in dataclasses.fields(StoredPart)]
    found = dict(zip(form, row, strict=True)) if isinstance(row, list) and len(row) == len(form) else {}
    file = found.pop("file", None)
    is_file = isinstance(file, str) and _FILE_NAME.fullmatch(file) is not None
    if not is_file or not all(type(number) is int and number >= 0 for number in found.values()):
        raise errors.IncompleteCheckpointError(
            f"{path} is damaged: the part of {tensor:.200} must be {form}; got {short_text(row)}."
        )
    return StoredPart(*row)


def require_tiling(parts: Iterable[StoredPart], name: str, whole: torch.Tensor) -> list[StoredPart]:
    """Return the parts of a tensor in order; raise an ``IncompleteCheckpointError`` unless the parts make up all of it.

    ``whole`` is a tensor of the same shape and type on the meta device.
    """
    shape = whole.shape
    in_order = sorted(parts, key=lambda part: part.begin)
    *begins, end = itertools.accumulate([part.size for part in in_order], initial=0)
    dims = {part.dim for part in in_order}
    is_gapless = [part.begin for part in in_order] == begins
    is_covered = is_gapless and len(dims) == 1 and max(dims) < len(shape) and end == shape[max(dims)]
    if not is_covered or whole.nbytes > sum(part.length for part in in_order):
        rows = ", ".join(f"{part.begin} to {part.begin + part.size}" for part in in_order[:_MOST_NAMED_PARTS])
        raise errors.IncompleteCheckpointError(
            f"The parts of {name:.200} do not make up a tensor of the shape {list(shape)}; got the rows {rows}. A file "
            "of the checkpoint is missing or damaged. Use another checkpoint."
        )
    return in_order
