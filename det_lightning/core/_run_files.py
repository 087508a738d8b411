"""Where runs outside of experiments put their files, and the run that this process began last."""

from __future__ import annotations

import datetime
import socket
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from det_lightning.core._tensorboard import TensorBoardOutput


def default_directory() -> Path:
    """Return a new directory below ``runs/``."""
    started = datetime.datetime.now().strftime("%b%d_%H-%M-%S")
    return Path(f"runs/{started}_{socket.gethostname()}")


class Run(Protocol):
    """Anything that has TensorBoard files."""

    @property
    def tensorboard(self) -> TensorBoardOutput: ...


# Weak references, so that the run can be freed.
_latest: weakref.WeakValueDictionary[str, Run] = weakref.WeakValueDictionary()


def remember_run(run: Run) -> None:
    """Make this the run that :func:`latest_run` returns, for objects that trials create without a context."""
    _latest["run"] = run


def latest_run() -> Run | None:
    """Return the run that was begun last; None if there is none, or it was freed."""
    return _latest.get("run")
