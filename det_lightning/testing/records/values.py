"""Values as the recorder describes them: how far two of them are apart, and how messages show them."""

from __future__ import annotations

import math
import struct
from typing import Any

#: Struct formats of a number and of the integer with the same bits, and the low bits that the dtype lacks.
_FORMATS = {
    "float16": ("e", "H", 0),
    "bfloat16": ("f", "I", 16),
    "float32": ("f", "I", 0),
    "float64": ("d", "Q", 0),
    "float": ("d", "Q", 0),
}


def kind_of(value: Any) -> str | None:
    """Return what a value was, "array", "number" (of numpy or torch), "object" or "dict"; None if it is as it was."""
    return value.get("~", "dict") if isinstance(value, dict) else None


def number_in(described: Any) -> int | float | None:
    """Return a recorded value as a number; None if it is not one."""
    if kind_of(described) == "number":
        described = described["value"]
    return described if isinstance(described, int | float) and not isinstance(described, bool) else None


def may_be_same(one: Any, other: Any) -> bool:
    """Return whether two values may be equal although the record of one holds nothing but its class."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    unknown = any(kind_of(value) == "object" and "digest" not in value for value in (one, other))
    return unknown and (one.get("class") == other.get("class") or "dict" in (kind_of(one), kind_of(other)))


def dtype_of(value: Any) -> str:
    """Return the dtype, or the name of the Python type."""
    return str(value["dtype"]) if isinstance(value, dict) else type(value).__name__


def summary_of(value: Any) -> Any:
    """Return a recorded value in the form that messages show."""
    kind = kind_of(value)
    if kind == "array":
        return f"{value['dtype']} {'x'.join(map(str, value['shape']))} with digest {value['digest']}"
    if kind == "number":
        return f"{value['dtype']} {value['value']!r}"
    if kind == "object":
        return f"a {value['class']}"
    return f"{len(value)} items" if isinstance(value, list | dict) else value


def shown(value: Any) -> str:
    """Return the representation of a value, cut to 80 characters."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def distance(one: float, other: float) -> float:
    """Return ``|one - other|``: 0 for two NaNs, infinity for one."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other)
    return math.inf if math.isnan(apart) else apart


def ulps_between(one: float, other: float, dtype: str) -> int | None:
    """Return the number of steps from one representable number to the other; None unless both are finite floats."""
    if dtype not in _FORMATS or not (math.isfinite(one) and math.isfinite(other)):
        return None
    number_format, integer_format, missing = _FORMATS[dtype]
    try:
        packed = struct.pack(f"<2{number_format}", float(one), float(other))
    except OverflowError:
        return None
    sign = 1 << (4 * len(packed) - 1)
    words = struct.unpack(f"<2{integer_format}", packed)
    # The positions among all numbers of the dtype in ascending order, 0 at zero.
    sizes: list[int] = [(word & ~sign) >> missing for word in words]
    return abs(sizes[0] - sizes[1]) if words[0] & sign == words[1] & sign else sizes[0] + sizes[1]
