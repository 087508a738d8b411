"""The loader of a run as callbacks see it: each iterator is a pass of its own, and changes nothing of the run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import data

from det_lightning.pytorch._data import DataLoader
from det_lightning.pytorch._random_state import (
    GENERATORS,
    Stateful,
    capture_rng,
    get_attributes,
    is_sampler_name,
    isolated_rng,
    restore_rng,
)

_COPIED = (*GENERATORS, data.Sampler, list, dict, set, np.ndarray, torch.Tensor)


class ShownLoader(data.DataLoader[Any]):
    """Has the attributes of a loader, and iterates over it apart from the run.

    The passes draw from copies of the loader's samplers and generators, and from global random states of their own.
    They have workers of their own. The data set itself is shared.

    Args:
        loader: the loader that the trial built, or the data that ``fit`` was given.
        length: the number of batches, or None if it is unknown.
        num_replicas, rank: a pass over a ``det_lightning.pytorch.DataLoader`` is the share of this rank.
    """

    def __init__(self, loader: Any, length: int | None, num_replicas: int = 1, rank: int = 0) -> None:
        # Torch's __init__ would build samplers: the attributes come from the loader.
        self._loader = loader
        self._length = length
        self._share = num_replicas, rank
        # Now, when the ranks are in the same states: their shares of a pass then have no sample in common.
        self._apart = _set_apart(loader) if isinstance(loader, DataLoader | data.DataLoader) else loader
        self._rng = capture_rng()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}.")
        return getattr(self._loader, name)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length.")
        return self._length

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = None
        while True:
            with isolated_rng():
                restore_rng(self._rng)
                try:
                    batches = self._begin() if batches is None else batches
                    batch = next(batches)
                except StopIteration:
                    return
                finally:
                    self._rng = capture_rng()
            yield batch

    def drop(self) -> None:
        """Let go of the loader, which ends its own workers once nothing refers to it."""
        self._loader = self._apart = None

    def _begin(self) -> Iterator[Any]:
        apart = self._apart
        if isinstance(apart, DataLoader):
            replicas, rank = self._share
            apart = apart.get_data_loader(repeat=False, skip=0, num_replicas=replicas, rank=rank)
        elif isinstance(apart, Stateful) and not isinstance(apart, data.DataLoader):
            apart = copy.copy(apart)  # its position is often a number among its attributes
        return iter(apart)


def _set_apart(loader: Any) -> Any:
    """Return a loader with copies of the generator and the samplers; what the samplers sample from is shared."""
    made = {id(loader.dataset): loader.dataset}
    names = ("generator", "sampler", "batch_sampler")
    sampling = {name: _copy_part(vars(loader)[name], made, name != "generator") for name in names}
    apart = copy.copy(loader)
    vars(apart).update(sampling, persistent_workers=False, _iterator=None)
    return apart


def _copy_part(part: Any, made: dict[int, Any], is_sampler: bool = False) -> Any:
    """Return a copy of a sampler, of a generator, or of a container of these; ``made`` has all copies by the id."""
    if id(part) in made or not (is_sampler or isinstance(part, _COPIED)):
        return made.get(id(part), part)
    made[id(part)] = copied = copy.deepcopy(part) if isinstance(part, GENERATORS) else copy.copy(part)
    if isinstance(copied, list):
        copied[:] = [_copy_part(one, made) for one in copied]
    parts = copied if isinstance(copied, dict) else get_attributes(copied)
    parts.update({name: _copy_part(one, made, is_sampler_name(name)) for name, one in parts.items()})
    return copied
