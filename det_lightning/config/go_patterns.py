"""Regular expressions of log policies, which are written for Go, as Python's."""

from __future__ import annotations

import re

_NAMED_CLASS = re.compile(r"\[:\^?\w+:\]")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a pattern as Python reads it; raise an ``re.error`` if Python has no such syntax, or another meaning."""
    if (found := _NAMED_CLASS.search(pattern)) is not None:
        raise re.error(f"{found[0]} is Go's: write the characters, such as A-Za-z for [:alpha:]")
    return re.compile(pattern)
