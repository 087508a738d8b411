"""Changes to a text that leave everything else of it as it is, to the byte."""

from __future__ import annotations

import re

_LINE_ENDS = re.compile(r"\r\n|\r|\n")


class Edits:
    """Replacements in a text, applied all at once.

    Args:
        text: what is changed.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        starts = [0, *(end.end() for end in _LINE_ENDS.finditer(text))]
        # Python does not count a form feed at the beginning of a line.
        self._line_starts = [start + text.startswith("\f", start) for start in starts]
        self._replacements: dict[tuple[int, int], str] = {}

    def offset(self, line: int, column: int) -> int:
        """Return the index in the text of a line, from 1, and a column in characters, from 0."""
        if line > len(self._line_starts):
            return len(self.text)
        return self._line_starts[line - 1] + column

    def line(self, offset: int) -> int:
        """Return the line, from 1, that an index in the text lies in."""
        return sum(start <= offset for start in self._line_starts)

    def indentation(self, offset: int) -> str:
        """Return the white space that the line of an index begins with."""
        start = self._line_starts[self.line(offset) - 1]
        return self.text[start : len(self.text) - len(self.text[start:].lstrip(" \t"))]

    def newline(self) -> str:
        """Return what ends the first line of the text."""
        found = _LINE_ENDS.search(self.text)
        return found.group() if found else "\n"

    def replace(self, start: int, end: int, new: str) -> None:
        """Replace ``text[start:end]``; a range that was given before is replaced by the newer text.

        Raises:
            ValueError: it overlaps with another replacement.
        """
        if (start, end) not in self._replacements and not self.is_free(start, end):
            raise ValueError(f"The replacement of {start}-{end} overlaps with another one.")
        self._replacements[start, end] = new

    def is_free(self, start: int, end: int) -> bool:
        """Return whether no part of ``text[start:end]`` is replaced."""
        return not any(start < other_end and other_start < end for other_start, other_end in self._replacements)

    def insert(self, offset: int, new: str, first: bool = False) -> None:
        """Insert a text before an index; after what was inserted there already, unless it is to be ``first``."""
        span = (offset, offset)
        there = self._replacements.get(span, "")
        self._replacements[span] = new + there if first else there + new

    def rewrite(self, start: int, end: int, new: str) -> None:
        """Replace ``text[start:end]``, and drop all replacements within it; see :meth:`render`."""
        for span in [span for span in self._replacements if start <= span[0] and span[1] <= end]:
            if span not in ((start, start), (end, end)):
                del self._replacements[span]
        self.replace(start, end, new)

    def covers(self, start: int, end: int) -> bool:
        """Return whether ``text[start:end]`` is in a part that is replaced."""
        return any(first <= start and end <= last for first, last in self._replacements)

    def render(self, start: int, end: int) -> str:
        """Return ``text[start:end]`` with the replacements within it, without what is inserted before or after it."""
        within = {
            span: new
            for span, new in self._replacements.items()
            if start <= span[0] and span[1] <= end and span not in ((start, start), (end, end))
        }
        return self._render(start, end, within)

    def result(self) -> str:
        """Return the text with all replacements."""
        return self._render(0, len(self.text), self._replacements)

    def _render(self, start: int, end: int, replacements: dict[tuple[int, int], str]) -> str:
        parts = []
        position = start
        for (first, last), new in sorted(replacements.items()):
            parts += [self.text[position:first], new]
            position = max(position, last)
        return "".join([*parts, self.text[position:end]])
