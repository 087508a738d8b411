"""Names from untrusted sources, made safe to show."""

from __future__ import annotations

from collections.abc import Sequence


def escape(text: object) -> str:
    r"""Return ``str(text)`` on one line, with characters that could control a terminal escaped, such as ``\x1b``."""
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in plain)


def name_some(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, separated by commas, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def name_type(value: object) -> str:
    """Return the type of a value as ``module.Name``, or the name alone for a built-in type."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
