"""Tensors of a sharded checkpoint, read part by part when a part is needed."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import SHARDS_DIR
from det_lightning.checkpoint.format.shards import (
    RESUME_ROOT,
    SHARDED_RESUME_VALUES,
    STATE_ROOT,
    StoredPart,
    map_tensors,
    read_indexes,
    require_tiling,
)
from det_lightning.checkpoint.safe_load.state_file import read_tensor_at


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of the whole ``shape``, with parts in the files of a sharded checkpoint."""

    shape: torch.Size
    dtype: torch.dtype
    _name: str
    _directory: pathlib.Path
    _parts: Sequence[StoredPart]
    _trusted: bool

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def read(self) -> torch.Tensor:
        """Return the whole tensor, in main memory; raise a ``CheckpointError`` if a part cannot be read."""
        dim = self._parts[0].dim
        return self.read_rows(dim, 0, self.shape[dim])

    def read_rows(self, dim: int, begin: int, count: int) -> torch.Tensor:
        """Return ``count`` rows in a dimension, in main memory, from the parts with such rows only; see `read`."""
        if dim != self._parts[0].dim:
            return self.read().narrow(dim, begin, count).clone()
        try:
            rows = torch.empty([*self.shape[:dim], count, *self.shape[dim + 1 :]], dtype=self.dtype)
        except RuntimeError as e:  # torch has no specific error for this
            raise errors.CheckpointError(
                f"{self._name:.200}, a tensor of the shape {[*self.shape]}, does not fit into main memory: {e}"
            ) from e
        for part in self._parts:
            first = max(begin, part.begin)
            last = min(begin + count, part.begin + part.size)
            if first < last:
                stored = self._read_part(part).narrow(dim, first - part.begin, last - first)
                rows.narrow(dim, first - begin, last - first).copy_(stored)
        return rows

    def _read_part(self, part: StoredPart) -> torch.Tensor:
        path = self._directory / SHARDS_DIR / part.file
        tensor = read_tensor_at(path, part.offset, part.length, trusted=self._trusted)
        expected = [*self.shape]
        expected[part.dim] = part.size
        if tensor.layout is not torch.strided or tensor.dtype is not self.dtype or [*tensor.shape] != expected:
            raise errors.IncompleteCheckpointError(
                f"{path} must hold {self._name:.200} at byte {part.offset:,}, in {self.dtype} and the shape "
                f"{expected}; got a tensor in {tensor.dtype} of the shape {[*tensor.shape]:}."
            )
        return tensor.detach()


def find_stored(directory: pathlib.Path, values: Any, name: str, *, trusted: bool) -> Any:
    """Return ``values`` with a :class:`StoredTensor` in place of each tensor that is stored in parts.

    ``name`` is the name of ``values``, such as ``"state"``. Raise an ``IncompleteCheckpointError`` if parts are
    missing.
    """
    parts = read_indexes(directory)

    def find(path: str, value: torch.Tensor) -> Any:
        if value.device.type != "meta" or path not in parts:
            return value
        in_order = require_tiling(parts[path], path, value)
        return StoredTensor(value.shape, value.dtype, path, directory, in_order, trusted)

    return map_tensors(values, find, name, torch.Tensor)


def find_parts(content: CheckpointContent, directory: pathlib.Path, *, trusted: bool) -> CheckpointContent:
    """Return the content of a sharded checkpoint with a :class:`StoredTensor` in place of each sharded tensor."""
    resume = content.resume
    if resume is not None:
        found = {name: getattr(resume, name) for name in SHARDED_RESUME_VALUES}
        resume = dataclasses.replace(resume, **find_stored(directory, found, RESUME_ROOT, trusted=trusted))
    state = find_stored(directory, content.state, STATE_ROOT, trusted=trusted)
    return dataclasses.replace(content, state=state, resume=resume, is_sharded=True)


def read_whole(values: Any) -> Any:
    """Return ``values``, nested dicts and lists, with a whole tensor in place of each :class:`StoredTensor`."""
    return map_tensors(values, lambda _, stored: stored.read(), "", StoredTensor)


def read_all_parts(content: CheckpointContent) -> CheckpointContent:
    """Return the content of a sharded checkpoint with whole tensors, in main memory, as if nothing were sharded."""
    resume = content.resume
    if resume is not None:
        whole = {name: read_whole(getattr(resume, name)) for name in SHARDED_RESUME_VALUES}
        resume = dataclasses.replace(resume, **whole)
    return dataclasses.replace(content, state=read_whole(content.state), resume=resume, is_sharded=False)
