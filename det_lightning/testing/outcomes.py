"""The outcomes of checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of a check."""

    name: str  # such as "is deterministic under a seed"
    outcome: str  # "passed", "failed" or "skipped"
    duration_s: float = 0.0
    message: str = ""  # why it failed or was skipped; may have several lines


class BadTrial(Exception):
    """The trial cannot be checked: it cannot be imported, or something is missing. The message says what to do."""


class NotChecked(Exception):
    """A check cannot be made; the message says why, and what it needs."""


class CheckFailed(AssertionError):
    """The trial fails a check. Holds a message, further findings, and the usual causes, likeliest first."""

    def __init__(self, message: str, details: Iterable[str] = (), causes: Iterable[str] = ()) -> None:
        listed_causes = [f"  - {cause}" for cause in causes]
        heading = ["Usual causes:"] if listed_causes else []
        super().__init__("\n".join([message, *(f"  - {detail}" for detail in details), *heading, *listed_causes]))
