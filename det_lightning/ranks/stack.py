"""Where the threads of this process are, according to their stacks."""

from __future__ import annotations

import dataclasses
import os
import sys
import sysconfig
import traceback
from types import FrameType

_LIBRARIES = ("det_lightning", "torch", "pytorch_lightning", "lightning_fabric", "lightning", "horovod")
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_EXCHANGES = ("det_lightning.ranks.exchange", "det_lightning.ranks.session")
# A backward pass averages gradients.
_COLLECTIVES = (*_EXCHANGES, "torch.distributed", "torch.nn.parallel", "torch.autograd", "horovod")
_WRITERS = (
    "det_lightning.checkpoint",
    "det_lightning.core._checkpoint",
    "det_lightning.engine.checkpointing",
    "pytorch_lightning.callbacks.model_checkpoint",
    "torch.serialization",
)
# A thread in these does not write, even if it is in a writer, too.
_OTHERS = (*_EXCHANGES, "det_lightning.checkpoint.retention", "torch.distributed")
_LOADERS = ("torch.utils.data",)
_WRAPPERS = frozenset({"wrapper", "wrapped", "decorate_context", "inner", "__call__"})


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a thread is."""

    text: str  # the innermost line of the user's code, and the functions that it has called
    waits: bool  # whether it is in an operation that waits for other ranks
    loads: bool  # whether it is waiting for a batch


def place_of(thread: int) -> Place | None:
    """Return where the thread with this identifier is; None if it has ended."""
    frames = _stack_of(thread)
    if not frames:
        return None
    users = next((index for index, frame in enumerate(frames) if _is_users(frame)), len(frames))
    return Place(
        text=_describe(frames, users),
        waits=any(_is_in(frame, _COLLECTIVES) for frame in frames[:users]),
        loads=any(_is_in(frame, _LOADERS) for frame in frames),
    )


def position_of(thread: int) -> tuple[tuple[int, int], ...]:
    """Return a value that differs from an earlier one if the thread has moved since; empty if it has ended."""
    return tuple((id(frame), frame.f_lasti) for frame in _stack_of(thread))


def _stack_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost one first.

    Frames inside an exchange of objects are left out: it polls, so they change even while the rank only waits.
    """
    innermost = _innermost_frames().get(thread)
    frames = [] if innermost is None else _outwards(innermost)
    exchanges = [index for index, frame in enumerate(frames) if _is_in(frame, _EXCHANGES)]
    return frames[exchanges[-1] :] if exchanges else frames


def writes_a_checkpoint() -> bool:
    """Return whether a thread of this process is writing a checkpoint without waiting for another rank."""
    return any(
        any(_is_in(frame, _WRITERS) for frame in frames) and not any(_is_in(frame, _OTHERS) for frame in frames)
        for frames in map(_outwards, _innermost_frames().values())
    )


def _innermost_frames() -> dict[int, FrameType]:
    return sys._current_frames()  # the documented way, in spite of its name


def _outwards(innermost: FrameType) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_stack(innermost)]


def _is_in(frame: FrameType, modules: tuple[str, ...]) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.startswith(modules) and any(f"{name}.".startswith(f"{module}.") for module in modules)


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not (file.startswith(("<", *_INSTALLED)) or _is_in(frame, _LIBRARIES))


def _describe(frames: list[FrameType], users: int) -> str:
    """Return the user's line and the public functions called from it; if there are many, the first and the last two."""
    inner = [frame.f_code.co_name for frame in reversed(frames[:users])]
    named = [name for name in dict.fromkeys(inner) if not name.startswith(("_", "<")) and name not in _WRAPPERS]
    calls = named if len(named) < 4 else [named[0], *named[-2:]]
    if users < len(frames):
        frame = frames[users]
        calls.insert(0, f"{frame.f_code.co_name} ({_shown(frame.f_code.co_filename)}:{frame.f_lineno})")
    return " > ".join(calls) or "an unknown place"


def _shown(file: str) -> str:
    """Return the path of a file, relative to the working directory if it is in there."""
    return file.removeprefix(os.path.join(os.getcwd(), ""))  # noqa: PTH109, PTH118 (kept as it is shown)
