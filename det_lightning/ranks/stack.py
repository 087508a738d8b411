"""What threads of this process do, according to their stacks: waiting for other ranks, loading a batch, saving."""

from __future__ import annotations

import sys
import traceback
from types import FrameType

_EXCHANGES = ("det_lightning.ranks.",)
# A backward pass averages gradients.
_COLLECTIVES = (*_EXCHANGES, "torch.distributed.", "torch.nn.parallel.", "torch.autograd.", "horovod.")
_SHARDS = "torch.distributed.checkpoint."
_WRITERS = (
    _SHARDS,
    "det_lightning.checkpoint.",
    "det_lightning.core._checkpoint.",
    "det_lightning.engine.checkpointing.",
    "pytorch_lightning.callbacks.model_checkpoint.",
    "torch.serialization.",
)
_BUSY = (*_WRITERS, "torch.utils.data.")
# Threads that wait, hold claims or delete checkpoints.
_NEVER_BUSY = (*_EXCHANGES, "det_lightning.checkpoint.retention.", "torch.utils.data._utils.pin_memory.")


def find_frames(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost one first; none if the thread has ended.

    Frames inside an exchange of objects are left out: it polls, so they change even while the rank only waits.
    """
    innermost = _innermost_frames().get(thread)
    frames = [] if innermost is None else _walk(innermost)
    exchanges = [index for index, frame in enumerate(frames) if _module(frame).startswith(_EXCHANGES)]
    return frames[exchanges[-1] :] if exchanges else frames


def is_waiting(innermost: FrameType) -> bool:
    """Return whether a thread with this innermost frame waits for other ranks."""
    module = _module(innermost)
    return module.startswith(_COLLECTIVES) and not module.startswith(_SHARDS)


def is_busy() -> bool:
    """Return whether a thread of this process loads a batch or writes a checkpoint, and waits for no other rank."""
    return any(map(_is_busy, _innermost_frames().values()))


def _is_busy(innermost: FrameType) -> bool:
    modules = [_module(frame) for frame in _walk(innermost)]
    works = any(module.startswith(_BUSY) for module in modules)
    return works and not is_waiting(innermost) and not any(module.startswith(_NEVER_BUSY) for module in modules)


def _innermost_frames() -> dict[int, FrameType]:
    return sys._current_frames()  # the documented way, in spite of its name


def _walk(innermost: FrameType) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_stack(innermost)]


def _module(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}."
