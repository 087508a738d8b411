"""Regular expressions of log policies: written for Go, compiled by Python."""

from __future__ import annotations

import re

_NAMED_CLASS = re.compile(r"\[:\^?\w+:\]")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a compiled pattern; raise an ``re.error`` for syntax unknown to Python or with another meaning."""
    if (found := _NAMED_CLASS.search(pattern)) is not None:
        raise re.error(f"{found[0]} is Go's: write the characters, such as A-Za-z for [:alpha:]")
    return re.compile(pattern)
