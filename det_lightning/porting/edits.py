"""Replaces parts of a text; the rest stays the same to the byte."""

from __future__ import annotations

import bisect
import re

_LINE_ENDS = re.compile(r"\r\n|\r|\n")


class Edits:
    """Replacements in a text, applied all at once."""

    def __init__(self, text: str) -> None:
        self.text = text
        starts = [0, *(end.end() for end in _LINE_ENDS.finditer(text))]
        # Python does not count a form feed at the beginning of a line.
        self._line_starts = [start + text.startswith("\f", start) for start in starts]
        self._replacements: dict[tuple[int, int], str] = {}

    def offset(self, line: int, column: int) -> int:
        """Return the index in the text of a line, from 1, and a column in characters, from 0."""
        return self._line_starts[line - 1] + column if line <= len(self._line_starts) else len(self.text)

    def indentation(self, offset: int) -> str:
        """Return the white space at the start of the line around an index."""
        start = self._line_starts[bisect.bisect_right(self._line_starts, offset) - 1]
        return self.text[start : len(self.text) - len(self.text[start:].lstrip(" \t"))]

    def newline(self) -> str:
        found = _LINE_ENDS.search(self.text)
        return found.group() if found else "\n"

    def replace(self, start: int, end: int, new: str) -> None:
        """Replace ``text[start:end]``, and drop all replacements inside; see :meth:`render`."""
        for span in self._within(start, end):
            del self._replacements[span]
        if (start, end) not in self._replacements and not self.is_free(start, end):
            raise ValueError(f"The replacement of {start}-{end} overlaps with another one.")
        self._replacements[start, end] = new

    def insert(self, offset: int, new: str, first: bool = False) -> None:
        """Insert a text before an index, after earlier insertions there, or with ``first`` before them."""
        present = self._replacements.get((offset, offset), "")
        self._replacements[offset, offset] = new + present if first else present + new

    def is_free(self, start: int, end: int) -> bool:
        return not any(start < other_end and other_start < end for other_start, other_end in self._replacements)

    def covers(self, start: int, end: int) -> bool:
        """Return whether a replacement covers ``text[start:end]``."""
        return any(first <= start and end <= last for first, last in self._replacements)

    def render(self, start: int, end: int) -> str:
        """Return ``text[start:end]`` with the replacements inside, without insertions at either end."""
        return self._render(start, end, self._within(start, end))

    def result(self) -> str:
        return self._render(0, len(self.text), list(self._replacements))

    def _within(self, start: int, end: int) -> list[tuple[int, int]]:
        inner = [span for span in self._replacements if start <= span[0] and span[1] <= end]
        return [span for span in inner if span not in ((start, start), (end, end))]

    def _render(self, start: int, end: int, spans: list[tuple[int, int]]) -> str:
        parts = []
        position = start
        for first, last in sorted(spans):
            parts += [self.text[position:first], self._replacements[first, last]]
            position = max(position, last)
        return "".join([*parts, self.text[position:end]])
