"""Escapes and masks what is shown, in one place each for errors, log records and the messages of commands."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from det_lightning.masking import mask_text


def escape(text: object) -> str:
    r"""Return ``str(text)`` on one line, with characters that could control a terminal escaped, such as ``\x1b``."""
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in plain)


def make_safe(message: object) -> str:
    """Return a message with unprintable characters escaped, and with the passwords and signatures of URLs masked.

    A line break stays before an indented line, as in a list or a stack.
    """
    return mask_text("\n  ".join(map(escape, str(message).split("\n  "))))


class SafeMessage:
    """A base of errors, before the builtin one: the text of the error is safe to show."""

    def __str__(self) -> str:
        return make_safe(super().__str__())


def make_record_safe(record: logging.LogRecord) -> bool:
    """Make the message of a record safe; a filter of a logger."""
    message = record.getMessage()
    safe = make_safe(message)
    if safe != message:
        record.msg, record.args = safe, ()
    return True


def get_logger(name: str) -> logging.Logger:
    """Return a logger of the package, whose messages are safe; a filter of ``det_lightning`` would miss children."""
    logger = logging.getLogger(name)
    logger.addFilter(make_record_safe)
    return logger


def name_some(names: Sequence[str], most: int = 5) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def name_type(value: object) -> str:
    """Return the type of a value as ``module.Name``, or the name alone for a built-in type."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
