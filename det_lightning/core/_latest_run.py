"""The run that this process has begun last, for what trials make without a context."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from det_lightning.core._tensorboard import TensorBoardOutput


class Run(Protocol):
    """Anything that has TensorBoard files."""

    @property
    def tensorboard(self) -> TensorBoardOutput:
        """The files."""


class _Latest:
    # A run is not kept from being freed.
    run: weakref.ref[Run] | None = None


def remember_run(run: Run) -> None:
    """Make this the run that :func:`latest_run` returns."""
    _Latest.run = weakref.ref(run)


def latest_run() -> Run | None:
    """Return the run that was begun last; None if there is none, or it is over and freed."""
    return None if _Latest.run is None else _Latest.run()
