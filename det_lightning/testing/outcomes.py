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
    """The trial fails a check. Holds a message, the usual causes, likeliest first, and further findings."""

    def __init__(self, message: str, *causes: str, details: Iterable[str] = ()) -> None:
        heading = ["Usual causes:"] if causes else []
        items = [[f"  - {item}" for item in items] for items in (details, causes)]
        super().__init__("\n".join([message, *items[0], *heading, *items[1]]))
