"""Copies of batches to a GPU, in parallel with the work on the batch before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from det_lightning.checkpoint.storage.snapshots import iterate_tensors


class SideStream:
    """A CUDA stream for the copies to one device, in parallel with the device's work. The host waits for no copy.

    A *mark* is a point in the order of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """Return a mark at the end of the work submitted so far."""
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, move: Callable[[Any], Any], batch: Any, after: Any) -> tuple[Any, Any]:
        """Begin ``move(batch)`` when the work reaches the mark ``after``; return the result, and a mark at the end."""
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            moved = move(batch)
        return moved, self._stream.record_event()

    def hand_over(self, moved: Any, end: Any) -> None:
        """Let the work submitted from now on wait for the mark ``end``, and then use ``moved``."""
        working = torch.cuda.current_stream(self._device)
        working.wait_event(end)
        for tensor in iterate_tensors(moved):
            if tensor.is_cuda:
                tensor.record_stream(working)  # the memory is not reused before the work is done


def copy_aside(batches: Iterator[Any], move: Callable[[Any], Any], stream: SideStream) -> Iterator[Any]:
    """Yield the results of ``move`` for each batch, copied while the device still works on the previous batch.

    A batch is taken from ``batches`` only on demand, so that random numbers are drawn in the usual order, and a
    checkpoint counts trained batches. By then the host is ahead of the device.
    """
    before = stream.mark()
    for batch in batches:
        # At the mark the memory of the batch before the last is free for this batch.
        moved, end = stream.copy(move, batch, before)
        before = stream.mark()
        stream.hand_over(moved, end)
        yield moved
