"""The line of the user's code that is being executed."""

from __future__ import annotations

import inspect
from collections.abc import Container
from pathlib import Path
from types import FrameType

from det_lightning.testing.training.trial_source import is_own_file

_PACKAGE = str(Path(__file__).parents[2])
# Functions of det_lightning that call optimizers, schedulers and backward passes, possibly through the user's code.
_ACTING = {"backward", "step", "step_optimizer", "synchronize", "_step_lr_schedulers"}
_OBSERVING = str(Path(__file__).parent)


def find_user_line(directory: Path, beyond_context: bool = False) -> str | None:
    """Return ``file:line`` of the innermost frame of the user's code below ``directory``, or None without one.

    With ``beyond_context``, return None if det_lightning called that code in order to step or to compute gradients.
    """
    line = None
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if beyond_context and file.startswith(_PACKAGE) and not file.startswith(_OBSERVING):
            return None if frame.f_code.co_name in _ACTING else line
        if line is None and is_own_file(file, directory):
            line = f"{Path(file).relative_to(directory)}:{frame.f_lineno}"
        frame = frame.f_back
    return line


def is_within(directory: Path, methods: Container[str]) -> bool:
    """Return whether one of these ``methods`` of the user's code below ``directory`` is being executed."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name in methods and is_own_file(frame.f_code.co_filename, directory):
            return True
        frame = frame.f_back
    return False
