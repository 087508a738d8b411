"""Regular expressions in Go's syntax, which log policies have, rewritten to Python's."""

from __future__ import annotations

import re

# What Go's named classes contain, as written between brackets.
_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "ascii": r"\x00-\x7f",
    "blank": r"\t ",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\t-\r ",
    "upper": "A-Z",
    "word": "0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}
# Quoted text, an escape, or a set in brackets, in which a class may be named.
_PART = re.compile(r"\\Q(?P<quoted>.*?)(?:\\E|\Z)|\\.|(?P<set>\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\])|\[", re.DOTALL)
_IN_SET = re.compile(r"\\.|\[:(?P<negated>\^?)(?P<name>\w+):\]|\[", re.DOTALL)


def compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern of Go as one of Python; raise an ``re.error`` if it is none, or has what only Go knows."""
    return re.compile(_PART.sub(_rewritten, pattern))


def _rewritten(found: re.Match[str]) -> str:
    if found["quoted"] is not None:
        return re.escape(found["quoted"])
    if found[0] == "[":
        raise re.error("missing ]")
    if found["set"] is not None:
        return "[" + _IN_SET.sub(_rewritten_in_set, found["set"][1:])
    return r"\Z" if found[0] == r"\z" else found[0]


def _rewritten_in_set(found: re.Match[str]) -> str:
    name = found["name"]
    if name is None:
        return r"\[" if found[0] == "[" else found[0]
    if name not in _CLASSES:
        raise re.error(f"unknown class [:{name}:]")
    return _others(_CLASSES[name]) if found["negated"] else _CLASSES[name]


def _others(members: str) -> str:
    """Return what is written between brackets for all characters that are not among ``members``."""
    are_members = re.compile(f"[{members}]")
    others = "".join(f"\\x{code:02x}" for code in range(128) if not are_members.match(chr(code)))
    return others + "\\x80-\\U0010ffff"
