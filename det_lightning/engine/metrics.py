"""The metrics of the batches of a window: collected on the device, converted together, and averaged."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from det_lightning.core._metrics import as_float

_NUMPY_TYPES = {
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.bool: np.bool_,
}


class MetricWindow:
    """The metrics of the batches since the last boundary.

    A tensor counts with the value at the time of :meth:`add`. Values on the CPU are converted at once; values on an
    accelerator stay there until all are copied to the host together, so that no batch waits for the device. With
    ``keeps_latest``, the latest metrics are also kept as added, until :meth:`take_latest`.
    """

    def __init__(self, keeps_latest: bool = False) -> None:
        #: The metrics of each batch, and the dtypes of numbers made of tensors of shape ``()``.
        self._batches: list[tuple[dict[str, Any], dict[str, torch.dtype]]] = []
        self._on_device = False
        self._sums: dict[str, tuple[Any, int]] = {}
        self._summed = 0
        self._keeps_latest = keeps_latest
        self._latest: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, metrics: dict[str, Any]) -> None:
        """Add the metrics of one batch; values on the CPU become arrays in ``metrics`` itself, as with Determined.

        Otherwise a trial that keeps the returned dict would keep the graph of each batch. With ``keeps_latest``,
        Lightning's callbacks get the metrics as the trial returned the dict.
        """
        returns_arrays = not self._keeps_latest and isinstance(metrics, dict)
        kept: dict[str, Any] = {}
        dtypes: dict[str, torch.dtype] = {}
        for name, value in metrics.items():
            # Checks the exact type first: a call for each metric of each batch is most of the cost of this method.
            if not (type(value) is torch.Tensor or isinstance(value, torch.Tensor)):
                kept[name] = value
                continue
            if not value.is_cpu or value.dtype not in _NUMPY_TYPES:
                kept[name] = value.detach().clone()
                self._on_device = True
                continue
            array = value.detach().numpy()
            if returns_arrays:
                metrics[name] = array
            if value.ndim == 0:
                # Several times faster than a copy; closing the window makes an array of the number.
                dtypes[name] = value.dtype
                kept[name] = array.item()
            else:
                # Numpy adds numbers in the order of memory, so the copy keeps the order.
                kept[name] = array.copy(order="K")
        self._batches.append((kept, dtypes))
        if self._keeps_latest:
            self._latest = metrics

    def take_latest(self) -> dict[str, Any] | None:
        """Return the metrics of the latest batch, and forget them; None if there are none."""
        latest = self._latest
        self._latest = None
        return latest

    def means(self) -> dict[str, torch.Tensor]:
        """Return the mean of each scalar metric so far, as float64 of shape ``()`` on the device of the metric."""
        number: float | torch.Tensor | None
        for batch, _ in self._batches[self._summed :]:
            for name, value in batch.items():
                if isinstance(value, torch.Tensor):
                    number = value.double() if value.ndim == 0 and not value.is_complex() else None
                else:
                    number = as_float(value)
                if number is not None:
                    total, count = self._sums.get(name, (0.0, 0))
                    self._sums[name] = (total + number, count + 1)
        self._summed = len(self._batches)
        return {
            name: torch.as_tensor(total / count, dtype=torch.float64) for name, (total, count) in self._sums.items()
        }

    def clear(self) -> None:
        """Begin a new window without metrics."""
        self._batches = []
        self._on_device = False
        self._sums = {}
        self._summed = 0
        self._latest = None

    def close(self) -> list[dict[str, Any]]:
        """Return the metrics of each batch, with tensors as numpy values, and begin a new window."""
        return self.begin_transfer().finish()

    def begin_transfer(self) -> MetricTransfer:
        """Begin to copy the metrics to the host, and begin a new window."""
        batches = [batch for batch, _ in self._batches]
        for batch, dtypes in self._batches:
            for name in dtypes:
                batch[name] = np.array(batch[name], _NUMPY_TYPES[dtypes[name]])
        transfer = MetricTransfer(batches, _stack_by_device(batches) if self._on_device else [])
        self.clear()
        return transfer


#: Where each value of a stack belongs: the metrics of a batch, and the name.
_Entries = list[tuple[dict[str, Any], str]]


class MetricTransfer:
    """The metrics of the ``batches`` of a window on the way to the host, in one copy for each device.

    A copy from a GPU is queued behind the GPU's work: neither the GPU nor the host waits before :meth:`finish`.
    ``runs_aside`` says whether there is a copy from a GPU.
    """

    def __init__(self, batches: list[dict[str, Any]], stacks: list[list[tuple[torch.Tensor, _Entries]]]) -> None:
        self._batches = batches
        self._copies = [(_HostCopy([stack for stack, _ in of_device]), of_device) for of_device in stacks]
        self.runs_aside = any(copy.runs_aside for copy, _ in self._copies)

    def finish(self) -> list[dict[str, Any]]:
        """Wait for the copies; return the metrics of each batch, with tensors as numpy values."""
        for copy, stacks in self._copies:
            for values, (_, entries) in zip(copy.values(), stacks, strict=True):
                for index, (batch, name) in enumerate(entries):
                    batch[name] = np.array(values[index])
        return self._batches


def _stack_by_device(batches: list[dict[str, Any]]) -> list[list[tuple[torch.Tensor, _Entries]]]:
    """Return, for each device, the tensors of batches, stacked by type and shape, and where each value belongs."""
    kinds: dict[tuple[Any, ...], _Entries] = {}
    for batch in batches:
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                kinds.setdefault((value.device, value.dtype, value.shape), []).append((batch, name))
    by_device: dict[torch.device, list[tuple[torch.Tensor, _Entries]]] = {}
    for (device, dtype, _), entries in kinds.items():
        stacked = torch.stack([batch[name] for batch, name in entries])
        stacked = stacked.float() if dtype is torch.bfloat16 else stacked
        by_device.setdefault(device, []).append((stacked, entries))
    return list(by_device.values())


class _HostCopy:
    """A copy of tensors from one device, several tensors as bytes; a copy from a GPU does not block the host."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._lengths: list[int] | None = None
        source = tensors[0]
        if len(tensors) > 1:
            flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
            self._lengths = [len(part) for part in flat]
            source = torch.cat(flat)
        self.runs_aside = source.is_cuda
        if self.runs_aside:
            # Only a copy to pinned memory does not block.
            self._copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._copy.copy_(source, non_blocking=True)
            self._end = torch.cuda.current_stream(source.device).record_event()
        else:
            self._copy = source.cpu()

    def values(self) -> list[np.ndarray[Any, Any]]:
        """Wait for the copy; return the values of each tensor."""
        if self.runs_aside:
            self._end.synchronize()
        if self._lengths is None:
            return [self._copy.numpy()]
        parts = torch.split(self._copy, self._lengths)
        return [
            part.clone().view(dtype).view(shape).numpy()
            for part, (dtype, shape) in zip(parts, self._kinds, strict=True)
        ]


def to_numpy(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics, with tensors as numpy values."""
    window = MetricWindow()
    window.add(metrics)
    return window.close()[0]


def average_metrics(batches: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the mean of each metric over a window; None for values without a mean."""
    names = batches[0].keys() if batches else {}.keys()
    for index, batch in enumerate(batches):
        if batch.keys() != names:
            raise ValueError(
                f"train_batch() must return the same metrics for every batch; got {sorted(batch)} for batch {index} of "
                f"the workload, and {sorted(names)} for the batches before."
            )
    return {name: _mean([batch[name] for batch in batches]) for name in names}


def _mean(values: list[Any]) -> float | None:
    try:
        array = np.array(values)
        # In an array of numbers none can be missing, so there is nothing to compare.
        present = array.ravel() if array.dtype.kind in "biuf" else array[array != None]  # noqa: E711 (by element)
        return cast("float", np.mean(present).item())
    except (TypeError, ValueError):
        return None
