"""Strict JSON, readable by every parser: NaN and infinities are written as text, as on Determined's platform."""

from __future__ import annotations

import json
import math
from typing import Any

#: Far more than a trial needs. A larger file is damaged, or meant to fill the memory; parsed, it takes 20 times that.
MAX_SMALL_FILE_BYTES = 16 * 1024 * 1024
#: Code that walks a value recurses as deep as it is nested.
MAX_DEPTH = 100

_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: Any, **options: Any) -> str:
    """Return plain values as JSON; ``options`` are the options of ``json.dumps``. NaN becomes the text ``"NaN"``.

    Raises a TypeError for a value that JSON cannot hold; see ``as_plain``.
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # there is such a number
        return json.dumps(spell_numbers(value), allow_nan=False, **options)


def spell_numbers(value: Any, where: str = "", places: list[str] | None = None) -> Any:
    """Return plain values with ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` in place of these numbers.

    The places, such as ``hparams['clip']``, are added to ``places``.
    """
    if isinstance(value, dict):
        return {key: spell_numbers(item, f"{where}[{key!r}]", places) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell_numbers(item, f"{where}[{index}]", places) for index, item in enumerate(value)]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if places is not None:
        places.append(where)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def read_numbers(value: Any, where: str, places: frozenset[str]) -> Any:
    """Reverse :func:`spell_numbers`: return ``value``, called ``where``, with numbers at these ``places``."""
    if not places:
        return value
    if isinstance(value, dict):
        return {key: read_numbers(item, f"{where}[{key!r}]", places) for key, item in value.items()}
    if isinstance(value, list):
        return [read_numbers(item, f"{where}[{index}]", places) for index, item in enumerate(value)]
    return _SPELLED.get(value, value) if isinstance(value, str) and where in places else value


def read_every_number(value: Any) -> Any:
    """Return ``value`` with a number for each text of :func:`spell_numbers`, where such text always means one."""
    if isinstance(value, dict):
        return {key: read_every_number(item) for key, item in value.items()}
    if isinstance(value, list):
        return [read_every_number(item) for item in value]
    return _SPELLED.get(value, value) if isinstance(value, str) else value


def escape_surrogates(value: Any) -> Any:
    r"""Return ``value`` with text that UTF-8 can hold: lone surrogates, as in odd file names, become ``\udcff``."""
    if isinstance(value, dict):
        return {escape_surrogates(key): escape_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape_surrogates(item) for item in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def is_shallow(value: Any) -> bool:
    """Return whether parsed JSON is shallow enough for recursive code."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [part for parts in inner for part in parts if isinstance(part, dict | list)]
        if not level:
            return True
    return False


def as_number(value: Any) -> float | None:
    """Return a number as a float, even if JSON holds a text; None for anything else, or a number too large."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    return _SPELLED.get(value) if isinstance(value, str) else None
