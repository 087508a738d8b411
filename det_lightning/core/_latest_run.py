"""The run that this process began last, for objects that trials create without a context."""

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
    # A weak reference, so that the run can be freed.
    run: weakref.ref[Run] | None = None


def remember_run(run: Run) -> None:
    """Make this the run that :func:`latest_run` returns."""
    _Latest.run = weakref.ref(run)


def latest_run() -> Run | None:
    """Return the run that was begun last; None if there is none, or it was freed."""
    return None if _Latest.run is None else _Latest.run()
