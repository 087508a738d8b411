"""What can be said of a check besides that it holds."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["BadTrial", "CheckFailed", "NotChecked"]


class BadTrial(Exception):
    """The trial cannot be looked at: it does not import, is not there, or lacks what it needs. Says what to do."""


class NotChecked(Exception):
    """A check cannot be checked here; the message says why, and what would be needed."""


class CheckFailed(AssertionError):
    """A check does not hold.

    Args:
        finding: what differs or is missing first, with names and amounts.
        details: further findings, a line each.
        causes: what usually causes it, the likeliest first.
    """

    def __init__(self, finding: str, details: Iterable[str] = (), causes: Iterable[str] = ()) -> None:
        self.finding = finding
        self.details = tuple(details)
        self.causes = tuple(causes)
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [self.finding, *(f"  - {detail}" for detail in self.details)]
        if self.causes:
            lines += ["Usual causes:", *(f"  - {cause}" for cause in self.causes)]
        return "\n".join(lines)
