"""Names that may come from anywhere, made fit to be shown."""

from __future__ import annotations


def escape(text: object) -> str:
    r"""Return ``str(text)`` on one line and without what could steer a terminal: ``\n``, ``\x1b`` and the like."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))
