"""Errors for wrong arguments: they name the call, the value, what was expected and the way out."""

from __future__ import annotations

import enum
import numbers
import os
from collections.abc import Iterable
from typing import Any, TypeVar

from det_lightning.masking import short_text

_E = TypeVar("_E", bound=enum.Enum)
_MOST_LISTED_NAMES = 12
_SHOWN = (type(None), numbers.Number, str, bytes, list, tuple, dict, set, os.PathLike)


def describe(value: Any) -> str:
    """Describe a value and its type in a message; an object by its type only."""
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of the class"
    kind = type(value).__name__
    return f"{short_text(value)} of type {kind}" if isinstance(value, _SHOWN) else f"an object of type {kind}"


def require(is_right: bool, call: str, expected: str, value: Any, advice: str = "") -> None:
    """Raise a TypeError unless an argument of ``call`` is right."""
    if not is_right:
        raise TypeError(wrong_argument(call, expected, value, advice))


def wrong_argument(call: str, expected: str, value: Any, advice: str = "") -> str:
    """Return the message for a wrong argument of ``call``."""
    return " ".join(filter(None, [f"{call} takes {expected}; got {describe(value)}.", advice]))


def find_member(call: str, kind: type[_E], value: Any) -> _E:
    """Return a member of an enumeration, given as such or by value; raise a ValueError otherwise."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(member.name for member in kind)
        raise ValueError(wrong_argument(call, f"a {kind.__name__} ({names})", value)) from None


def is_path(value: Any) -> bool:
    """Return whether a value names a file or directory."""
    return isinstance(value, str | os.PathLike)


def find_similar(name: object, known: Iterable[str]) -> str | None:
    """Return the known name most similar to a wrong one, whatever the case of letters; None if there is none."""
    import difflib

    by_small = {one.casefold(): one for one in sorted(known)}
    near = difflib.get_close_matches(str(name).casefold(), by_small, n=1)
    return by_small[near[0]] if near else None


def suggest(name: object, known: Iterable[str]) -> str:
    """Return a hint to append to a message: the most similar known name, or all names if there are few, or nothing."""
    names = sorted(known)
    if near := find_similar(name, names):
        return f"; did you mean {near}?"
    return f"; known are {', '.join(names)}" if 0 < len(names) <= _MOST_LISTED_NAMES else ""


def refuse_texts(call: str, **flags: Any) -> None:
    """Raise a TypeError if a flag is a text, since even ``"no"`` would count as True; name all such flags."""
    texts = [f"{name}={value!r}" for name, value in flags.items() if isinstance(value, str)]
    if texts:
        raise TypeError(f"{call} takes True or False; got {', '.join(texts)}. Even the text 'no' would count as True.")
