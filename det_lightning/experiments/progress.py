"""Estimates how much longer something will take from its progress so far."""

from __future__ import annotations


class Progress:
    """The progress of a run or an experiment, as reported from time to time: from 0 to 1, None before a report."""

    def __init__(self) -> None:
        self.fraction: float | None = None
        self._at_s = 0.0
        self._first_fraction = 0.0
        self._first_at_s = 0.0

    def report(self, fraction: float, at_s: float) -> None:
        """Note the progress at a time, in seconds."""
        if self.fraction is None:
            self._first_fraction = fraction
            self._first_at_s = at_s
        if self.fraction is None or fraction != self.fraction:
            self.fraction = fraction
            self._at_s = at_s

    def time_left_s(self, now_s: float) -> float | None:
        """Return the seconds left at the average speed so far; None if that is not known, as after a single report."""
        if self.fraction is None or self.fraction <= self._first_fraction or self._at_s <= self._first_at_s:
            return None
        speed = (self.fraction - self._first_fraction) / (self._at_s - self._first_at_s)
        return max((1 - self.fraction) / speed - (now_s - self._at_s), 0.0)
