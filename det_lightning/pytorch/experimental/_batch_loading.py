"""Which batches of a dataset a rank processes."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sized
from typing import Any, cast

from torch.utils import data

from det_lightning.core._distributed import DistributedContext
from det_lightning.pytorch._data import DataLoader

_DEFAULT_BATCH_SIZE = 1
_OF_THE_ORDER = ("sampler", "batch_sampler")


@dataclasses.dataclass(frozen=True)
class BatchLoading:
    """How the batches of a dataset are built and shared among the ranks."""

    dataset: data.Dataset[Any]
    batch_size: int  # records per batch
    max_batches: int | None  # number of batches of each rank; None: all
    checkpoint_interval: int  # number of batches of each rank between checkpoints
    options: dict[str, Any]  # further arguments of the loader

    @classmethod
    def of_call(
        cls,
        dataset: data.Dataset[Any],
        batch_size: int | None,
        max_batches: int | None,
        checkpoint_interval: int,
        dataloader_kwargs: Mapping[str, Any] | None,
    ) -> BatchLoading:
        """Return the loading that the arguments of ``torch_batch_process`` ask for.

        Raises:
            ValueError: arguments cannot be used; all are named.
            TypeError: the dataset has no length.
        """
        options = dict(dataloader_kwargs or {})
        mistakes = [
            f"dataloader_kwargs has {name}, and the batches are shared out in the order of the dataset: leave it out"
            for name in _OF_THE_ORDER
            if name in options
        ]
        if options.pop("shuffle", False):
            mistakes.append("dataloader_kwargs has shuffle=True, and a resumed run could not go on: leave it out")
        if batch_size is not None and "batch_size" in options:
            mistakes.append("batch_size is given twice, as an argument and in dataloader_kwargs: leave one out")
        in_options = options.pop("batch_size", _DEFAULT_BATCH_SIZE)
        size = in_options if batch_size is None else batch_size
        named = {"batch_size": size, "checkpoint_interval": checkpoint_interval}
        mistakes += [f"{name} must be at least 1; got {value!r}" for name, value in named.items() if value < 1]
        if mistakes:
            raise ValueError(f"torch_batch_process() cannot use its arguments: {'; '.join(mistakes)}.")
        if not isinstance(dataset, Sized):
            raise TypeError(
                f"torch_batch_process() takes a dataset with a length; {type(dataset).__name__} has no __len__()."
            )
        return cls(cast("data.Dataset[Any]", dataset), size, max_batches, checkpoint_interval, options)

    def length(self, ranks: int) -> int:
        """Return the number of batches that each of ``ranks`` ranks processes; some may have one fewer."""
        length = math.ceil(len(cast("Sized", self.dataset)) / self.batch_size / ranks)
        if self.max_batches is None:
            return length
        if 0 < self.max_batches <= length:
            return self.max_batches
        warnings.warn(
            f"max_batches={self.max_batches} has no effect: each rank processes all its {length} batches.",
            stacklevel=2,
        )
        return length

    def loader(self, first_batch: int, ranks: DistributedContext) -> data.DataLoader[Any]:
        """Return the loader of this rank, from its batch ``first_batch`` on."""
        loader = DataLoader(self.dataset, batch_size=self.batch_size, shuffle=False, **self.options)
        return loader.get_data_loader(skip=first_batch, num_replicas=ranks.size, rank=ranks.rank)
