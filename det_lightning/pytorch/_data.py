"""``DataLoader``, which shards, repeats and skips; the length of batches, and moving batches to a device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils import data

from det_lightning.arguments import wrong_argument
from det_lightning.escaping import get_logger
from det_lightning.pytorch import samplers
from det_lightning.pytorch._position import DealtBatchSampler, ResumableBatchSampler
from det_lightning.pytorch._random_state import PassJournal

logger = get_logger(__name__)

TorchData = dict[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor
# The kinds of numpy dtype with tensors in torch: float, complex, int, unsigned int, bool.
_TENSOR_KINDS = "fciub"
# The types of batches and their parts.
_BATCH_TYPES = (torch.Tensor, list, tuple, dict, np.ndarray)


class DataLoader:
    """Takes the arguments of ``torch.utils.data.DataLoader``, and builds torch's loader once the run is known.

    Torch's loader then also repeats the data, shards batches over ranks and skips batches seen before a resume. To try
    out the loader alone, call :meth:`get_data_loader` or iterate.

    The arguments are also attributes, and can be changed until torch's loader is built.

    Args:
        dataset: a map-style dataset.
        batch_size: samples per batch on each rank; see ``context.get_per_slot_batch_size``.
        shuffle: draw a new order for every epoch, from the global random state or ``generator``.
        sampler: determines the order instead of ``shuffle``.
        batch_sampler: determines the batches instead of ``batch_size``, ``shuffle``, ``sampler`` and ``drop_last``.
        prefetch: when training on a GPU with workers, copy each batch from pinned memory while the GPU works on the
            previous batch. ``False`` turns off the copies and the pinned memory.
        **torch_kwargs: further arguments of torch's DataLoader (``in_order``, ``pin_memory_device``, ...).

    All arguments not listed are as in torch.

    Raises:
        ValueError: ``dataset`` is iterable-style, ``batch_size`` and ``batch_sampler`` are both missing, or torch
            does not take the combination of arguments.

    Example:
        >>> import torch
        >>> from det_lightning.pytorch import DataLoader
        >>> loader = DataLoader(torch.arange(6), batch_size=2)
        >>> [batch.tolist() for batch in loader.get_data_loader(num_replicas=2, rank=1)]
        [[2, 3]]
    """

    # Set while a run builds its loader.
    _journal: PassJournal | None = None
    _pins = False

    def __init__(
        self,
        dataset: data.Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: data.Sampler[Any] | None = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        prefetch: bool = True,
        **torch_kwargs: Any,
    ) -> None:
        if isinstance(dataset, data.IterableDataset):
            raise ValueError(
                f"DataLoader got the IterableDataset {type(dataset).__name__}, which cannot be sharded or skipped from "
                "outside. Return a torch.utils.data.DataLoader, call context.experimental."
                "disable_dataset_reproducibility_checks(), and shard, repeat and skip in the dataset."
            )
        if batch_sampler is None and batch_size is None:
            raise ValueError(
                "DataLoader got batch_size=None and batch_sampler=None: without batches nothing can be counted. Pass a "
                "batch_size or a batch_sampler, or return a torch.utils.data.DataLoader and call "
                "context.experimental.disable_dataset_reproducibility_checks()."
            )
        is_dataset = hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
        if not is_dataset or isinstance(dataset, type):
            raise TypeError(wrong_argument("DataLoader()", "a dataset", dataset))
        self.dataset = dataset
        self.num_workers = num_workers
        self.persistent_workers = persistent_workers
        self.multiprocessing_context = multiprocessing_context
        self.worker_init_fn = worker_init_fn
        self.pin_memory = pin_memory
        self.timeout = timeout
        self.generator = generator
        self.prefetch_factor = prefetch_factor
        self.collate_fn = collate_fn
        self.prefetch = prefetch
        self._torch_kwargs = torch_kwargs
        # torch checks the arguments and creates the samplers; this loader itself is never iterated.
        template = self._build(
            batch_size=batch_size, shuffle=shuffle, sampler=sampler, batch_sampler=batch_sampler, drop_last=drop_last
        )
        self.batch_size = template.batch_size
        self.drop_last = template.drop_last
        self.sampler = template.sampler
        self.batch_sampler = cast("Any", template.batch_sampler)
        self.prefetch_factor = template.prefetch_factor
        self.collate_fn = template.collate_fn

    def get_data_loader(
        self, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
    ) -> data.DataLoader[Any]:
        """Build torch's loader over the share of one rank: batches ``rank``, ``rank + num_replicas``, ...

        Args:
            repeat: repeat the data endlessly.
            skip: number of this rank's batches to skip at the beginning.
            num_replicas: number of ranks that share the batches.
            rank: the rank.
        """
        if self._journal is None or not repeat:
            return self._build(batch_sampler=adapt_batch_sampler(self.batch_sampler, repeat, skip, num_replicas, rank))
        ranks = self._journal.ranks
        # Prefetching workers may be this many batches ahead of training, and each batch may begin new passes.
        self._journal.keep = (2 + self.num_workers * (self.prefetch_factor or 0)) * ranks
        sampler: Any = ResumableBatchSampler(self.batch_sampler, self._journal, skip * ranks)
        if ranks == num_replicas:
            sampler = adapt_batch_sampler(sampler, num_replicas=num_replicas, rank=rank)
        else:
            sampler = DealtBatchSampler(sampler, ranks, num_replicas, rank)
        return self._build(self._pins, batch_sampler=sampler)

    def copies_aside(self, device: torch.device) -> bool:
        """Return whether training batches are copied to ``device`` while the device works on earlier batches."""
        return self.prefetch and self.num_workers > 0 and device.type == "cuda"

    def get_resumable_loader(
        self, journal: PassJournal, first_batch: int = 0, num_replicas: int = 1, rank: int = 0, pins: bool = False
    ) -> data.DataLoader[Any]:
        """Build torch's loader for training: endless, from this rank's batch ``first_batch`` on.

        ``pins`` overrules ``pin_memory``. If a subclass overrides :meth:`get_data_loader`, ``super()`` with ``repeat``
        returns the resumable loader.
        """
        self._journal = journal
        self._pins = pins
        try:
            return self.get_data_loader(repeat=True, skip=first_batch, num_replicas=num_replicas, rank=rank)
        finally:
            self._journal = None

    def _build(self, pins: bool = False, **batching: Any) -> data.DataLoader[Any]:
        return data.DataLoader(
            self.dataset,
            num_workers=self.num_workers,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory or pins,
            timeout=self.timeout,
            worker_init_fn=functools.partial(_begin_worker, self.worker_init_fn),
            multiprocessing_context=self.multiprocessing_context,
            generator=self.generator,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            **batching,
            **self._torch_kwargs,
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get_data_loader())

    def __len__(self) -> int:
        return len(self.batch_sampler)


def _begin_worker(init: Callable[[int], None] | None, worker_id: int) -> None:
    """Start a worker process that loads batches, in a separate process group."""
    # Schedulers signal whole groups, and a killed worker would end the run before the run is saved.
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    if init is not None:
        init(worker_id)


def adapt_batch_sampler(
    batch_sampler: Any, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
) -> Any:
    """Wrap ``batch_sampler`` to repeat, shard and skip, in this order.

    Example:
        >>> from det_lightning.pytorch import adapt_batch_sampler
        >>> list(adapt_batch_sampler([[0, 1], [2, 3], [4, 5]], skip=1, num_replicas=2, rank=0))
        [[4, 5]]
    """
    if repeat:
        batch_sampler = samplers.RepeatBatchSampler(batch_sampler)
    if num_replicas > 1:
        batch_sampler = samplers.DistributedBatchSampler(batch_sampler, num_replicas, rank)
    if skip > 0:
        batch_sampler = samplers.SkipBatchSampler(batch_sampler, skip)
    return batch_sampler


def data_length(data: Any) -> int:
    """Return the number of records in a batch: the length of the first array in it.

    Raises:
        ValueError: ``data`` is an empty mapping, list or tuple.
        TypeError: ``data`` has another type; override ``PyTorchTrial.get_batch_length`` to support the type.

    Example:
        >>> import torch
        >>> from det_lightning.pytorch import data_length
        >>> data_length({"pixels": torch.zeros(8, 3), "labels": torch.zeros(8)})
        8
    """
    kind = type(data) if type(data) in _BATCH_TYPES else _batch_type(data)
    if kind is list or kind is tuple or kind is dict:
        if not data:
            raise ValueError(f"A batch must hold at least one array or tensor; got an empty {type(data).__name__}.")
        data = next(iter(data.values())) if kind is dict else data[0]
    elif kind is object:
        raise TypeError(
            f"The number of records in a batch of type {type(data).__name__} is unknown; override get_batch_length() "
            "in the trial."
        )
    # len() of a tensor is a function in Python, and slower.
    return data.shape[0] if type(data) is torch.Tensor and data.ndim else len(data)


def to_device(data: Any, device: torch.device | str, warned_types: set[type] | None = None) -> Any:
    """Move a batch, with any nesting of mappings, lists and tuples, to ``device``; the structure is kept.

    numpy arrays of numbers become tensors. Other objects are moved by their ``to`` method, or returned unchanged if
    there is no such method, with one warning for each type.

    Args:
        data, device: the batch, or a part, and the target.
        warned_types: the types warned about so far; the function adds to the set.

    Example:
        >>> import numpy as np
        >>> from det_lightning.pytorch import to_device
        >>> to_device({"numbers": [np.arange(3)]}, "cpu")
        {'numbers': [tensor([0, 1, 2])]}
    """
    return move(torch.device(device), set() if warned_types is None else warned_types, data)


def move(device: torch.device, warned_types: set[type], data: Any) -> Any:
    """Move a batch to ``device``; see :func:`to_device`."""
    # Most batches are containers of tensors that are on the device already: such tensors cost no call.
    kind = type(data) if type(data) in _BATCH_TYPES else _batch_type(data)
    if kind is dict and not isinstance(data, dict) and callable(getattr(data, "to", None)):
        return data.to(device)  # a BatchEncoding, for example, keeps its attributes
    if kind is list or kind is tuple:
        parts = [*data]
        for index, value in enumerate(parts):
            if type(value) is not torch.Tensor or value.device != device:
                parts[index] = move(device, warned_types, value)
        return parts if kind is list else tuple(parts)
    if kind is dict:
        entries = dict(data.items())
        for key in entries:
            value = entries[key]
            if type(value) is not torch.Tensor or value.device != device:
                entries[key] = move(device, warned_types, value)
        return entries
    if type(data) is torch.Tensor:
        # Work on a device waits for copies to the device; work on the CPU would not wait.
        return data if data.device == device else data.to(device, non_blocking=device.type != "cpu")
    if kind is np.ndarray:
        if data.dtype.kind in _TENSOR_KINDS:
            return torch.from_numpy(data).to(device, non_blocking=device.type != "cpu")
    elif callable(to := getattr(data, "to", None)):
        return to(device)
    if type(data) not in warned_types:
        warned_types.add(type(data))
        name = type(data).__name__
        logger.warning(
            "to_device() cannot move data of type %s to %s; the data are passed on as they are.", name, device
        )
    return data


def _batch_type(data: Any) -> type:
    """Return the type in ``_BATCH_TYPES`` that ``data`` is an instance of, else ``object``."""
    for known in _BATCH_TYPES:
        if isinstance(data, known):
            return known
    return dict if isinstance(data, Mapping) else object
