"""What can come of a check besides that the trial passes it."""

from __future__ import annotations

from collections.abc import Iterable


class BadTrial(Exception):
    """The trial cannot be checked: it does not import, does not exist, or lacks what it needs. Says what to do."""


class NotChecked(Exception):
    """A check cannot be made here; the message says why, and what would be needed."""


class CheckFailed(AssertionError):
    """The trial does not pass a check.

    Args:
        message: what differs or is missing first, with names and amounts.
        details: more of that, a line each.
        causes: what usually causes it, the likeliest first.
    """

    def __init__(self, message: str, details: Iterable[str] = (), causes: Iterable[str] = ()) -> None:
        listed_causes = [f"  - {cause}" for cause in causes]
        heading = ["Usual causes:"] if listed_causes else []
        super().__init__("\n".join([message, *(f"  - {detail}" for detail in details), *heading, *listed_causes]))
