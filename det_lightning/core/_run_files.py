"""The directory of a run outside of experiments, and the latest run of this process."""

from __future__ import annotations

import datetime
import socket
import weakref
from pathlib import Path
from typing import Any

# Weak references, so that the run can be freed.
_latest: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def default_directory() -> Path:
    """Return a new directory below ``runs/``."""
    started = datetime.datetime.now().strftime("%b%d_%H-%M-%S")
    return Path(f"runs/{started}_{socket.gethostname()}")


def remember_run(run: Any) -> None:
    """Remember the latest run, with its ``tensorboard``, for objects that trials create without a context."""
    _latest["run"] = run


def latest_run() -> Any:
    """Return the latest run; None before the first run and after the run was freed."""
    return _latest.get("run")
