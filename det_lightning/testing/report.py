"""The conversion report: one self-contained HTML page."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from det_lightning.testing.difference import Difference
from det_lightning.testing.record import TrainingRecord

__all__ = ["Promise", "ReportData", "write_report"]


@dataclasses.dataclass(frozen=True)
class Promise:
    """One line of the checklist.

    Attributes:
        name: what is promised, such as ``"is deterministic under a seed"``.
        outcome: ``"passed"``, ``"failed"``, ``"error"`` or ``"skipped"``.
        duration_s: how long it took, in seconds.
        message: why it failed or was skipped; may have several lines.
    """

    name: str
    outcome: str
    duration_s: float = 0.0
    message: str = ""


@dataclasses.dataclass(frozen=True)
class ReportData:
    """All that a report shows.

    Attributes:
        trial: the trial, as ``"module:Class"``.
        promises: the checklist, in order.
        reference: the record of the real determined, if there is one.
        ours: the record of det_lightning, if there is one.
        difference: the first difference of the two, if any.
        command: the command line that made it, shown for who wants to make it again.
    """

    trial: str
    promises: Sequence[Promise]
    reference: TrainingRecord | None = None
    ours: TrainingRecord | None = None
    difference: Difference | None = None
    command: str = ""


def write_report(path: str | os.PathLike[str], data: ReportData) -> None:
    """Write the report to ``path``, replacing what is there. Needs jinja2 (``pip install 'det-lightning[testing]'``).

    Raises:
        ImportError: jinja2 is not installed.
        OSError: the file can not be written.
    """
    raise NotImplementedError
