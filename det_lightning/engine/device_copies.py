"""Copies of training batches to a GPU, on a stream of their own beside its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from det_lightning.checkpoint.storage.background import tensors_in


class SideStream(Protocol):
    """Where copies run beside the work of a device; a point in the order of its work is a *mark*."""

    def mark(self) -> Any:
        """Return the end of the work that was begun up to now."""

    def copy(self, move: Callable[[Any], Any], batch: Any, after: Any) -> tuple[Any, Any]:
        """Begin ``move(batch)`` beside the work, once that has come to the mark ``after``; return it and its end."""

    def hand_over(self, moved: Any, end: Any) -> None:
        """Let the work that is begun from now on wait for the mark ``end``, and use ``moved``."""


class CudaSideStream:
    """A CUDA stream for the copies of one device. The host waits for none of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        mark: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return mark

    def copy(self, move: Callable[[Any], Any], batch: Any, after: torch.cuda.Event) -> tuple[Any, torch.cuda.Event]:
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            moved = move(batch)
        return moved, self._stream.record_event()

    def hand_over(self, moved: Any, end: torch.cuda.Event) -> None:
        working = torch.cuda.current_stream(self._device)
        working.wait_event(end)
        for tensor in tensors_in(moved):
            if tensor.is_cuda:
                tensor.record_stream(working)  # its memory is not used again before the work on it is done


def copy_aside(batches: Iterator[Any], move: Callable[[Any], Any], stream: SideStream) -> Iterator[Any]:
    """Yield each batch as ``move`` returns it, copied while the device still works on the one before.

    A batch is taken from ``batches`` when it is asked for, as without: so random numbers are drawn in the same order,
    and a checkpoint counts what was trained. The host is ahead of the device by then.
    """
    before = stream.mark()
    for batch in batches:
        # The memory of the batch before the last is free at that mark, and may be that of this one.
        moved, end = stream.copy(move, batch, before)
        before = stream.mark()
        stream.hand_over(moved, end)
        yield moved
