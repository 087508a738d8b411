"""Lines of a trial that change its data in place: operations on tensors that share memory with a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from det_lightning.testing.observation.user_lines import find_user_line

_ASSIGNMENTS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ipow__"}
_MAX_OBJECTS = 20_000


class InPlaceChanges:
    """Notes which lines below ``directory`` change a tensor of the datasets."""

    def __init__(self, directory: Path) -> None:
        self.lines: dict[str, None] = {}
        self._directory = directory
        self._memory: set[int] = set()

    def watch(self, data: Iterable[Any]) -> None:
        """Watch the tensors and arrays that datasets hold now."""
        self._memory = set(_addresses_in(data))

    def note(self, function: str, args: tuple[Any, ...]) -> None:
        """Note a call of a function of torch if it changes what is watched."""
        changes = function in _ASSIGNMENTS or (function.endswith("_") and not function.endswith("__"))
        if changes and not self._memory.isdisjoint(_addresses_in(args[:1])):
            line = find_user_line(self._directory) or "a line outside of the trial's files"
            self.lines[f"{line}: {function}() changes the data of a dataset in place"] = None


def _addresses_in(values: Iterable[Any]) -> Iterator[int]:
    """Yield where tensors and arrays begin in memory, of nested containers and of the attributes of datasets."""
    left = list(values)
    seen: set[int] = set()
    for value in left:  # which grows
        if id(value) in seen or len(seen) > _MAX_OBJECTS:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            yield value.untyped_storage().data_ptr()
        elif isinstance(value, np.ndarray):
            yield value.__array_interface__["data"][0]
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        elif isinstance(value, Dataset):
            left += vars(value).values()
