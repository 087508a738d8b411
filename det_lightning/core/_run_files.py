"""The files of a script or a trial other than its checkpoints, and the run that this process began last."""

from __future__ import annotations

import datetime
import functools
import json
import socket
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from det_lightning.core._task import TrialTask, as_json

if TYPE_CHECKING:
    from det_lightning.core._tensorboard import TensorBoardOutput


class RunFiles:
    """Where the TensorBoard files, metadata and status of a script that uses the Core API are.

    In a trial of an experiment that is the trial's directory; otherwise a new directory below ``runs/``, which is
    created when something is written.
    """

    def __init__(self, task: TrialTask | None) -> None:
        self._task = task

    @functools.cached_property
    def directory(self) -> Path:
        return default_directory() if self._task is None else self._task.directory

    @property
    def tensorboard(self) -> Path:
        return self.directory if self._task is None else self._task.tensorboard_path

    def read(self, name: str) -> dict[str, Any]:
        """Return the content of one of the files, or an empty dict if it does not exist."""
        try:
            content: dict[str, Any] = json.loads((self.directory / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return content

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Replace one of the files."""
        self.directory.mkdir(parents=True, exist_ok=True)
        file = self.directory / name
        draft = file.with_suffix(".tmp")
        draft.write_text(json.dumps(as_json(content), indent=1), encoding="utf-8")
        draft.replace(file)


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
