"""Values as the recorder describes them: how far two of them are apart, and how they read."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = [
    "distance",
    "dtype_of",
    "elements",
    "is_array",
    "is_plain_dict",
    "is_unknown",
    "largest_element",
    "number_in",
    "shown",
    "size_of",
    "statistics",
    "summary_of",
    "ulps_between",
]

#: Format of the number and of the integer with the same bits, and the bits that the dtype lacks at the lower end.
_FORMATS = {
    "float16": ("<e", "<h", 0),
    "bfloat16": ("<f", "<i", 16),
    "float32": ("<f", "<i", 0),
    "float64": ("<d", "<q", 0),
    "float": ("<d", "<q", 0),
}


def number_in(described: Any) -> int | float | None:
    """Return the number that a recorded value is, or None."""
    if isinstance(described, dict) and described.get("~") == "number":
        described = described["value"]
    return described if isinstance(described, int | float) and not isinstance(described, bool) else None


def is_array(value: Any) -> bool:
    """Tell whether the value was an array or a tensor."""
    return isinstance(value, dict) and value.get("~") == "array"


def is_plain_dict(value: Any) -> bool:
    """Tell whether the value was a dict."""
    return isinstance(value, dict) and "~" not in value


def is_unknown(value: Any) -> bool:
    """Tell whether the record has nothing but the class of the value."""
    return isinstance(value, dict) and value.get("~") == "object" and "digest" not in value


def dtype_of(value: Any) -> str:
    """Return the dtype, or the name of the type in Python."""
    return str(value["dtype"]) if isinstance(value, dict) else type(value).__name__


def size_of(array: Any) -> int:
    """Return the number of elements."""
    return math.prod(array["shape"])


def summary_of(value: Any) -> Any:
    """Return what a message shows of a recorded value."""
    if is_array(value):
        shape = "x".join(map(str, value["shape"]))
        return f"{value['dtype']} {shape} with digest {value['digest']}"
    if isinstance(value, dict) and value.get("~") == "number":
        return f"{value['dtype']} {value['value']!r}"
    if isinstance(value, dict) and value.get("~") == "object":
        return f"a {value['class']}"
    return f"{len(value)} items" if isinstance(value, list | dict) else value


def shown(value: Any) -> str:
    """Return a summary in a few characters."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def largest_element(arrays: Iterable[Any]) -> float:
    """Return the largest absolute value in arrays; 0 where there is none."""
    return max((abs(array.get(end, 0.0)) for array in arrays for end in ("minimum", "maximum")), default=0.0)


def statistics(theirs: Any, mine: Any) -> Iterator[tuple[str, float, float]]:
    """Yield name and values of the statistics that both arrays have."""
    for name in ("norm", "mean", "minimum", "maximum"):
        if name in theirs and name in mine:
            yield name, theirs[name], mine[name]


def elements(theirs: Any, mine: Any) -> Iterator[tuple[str, float, float]]:
    """Yield name and values of the elements of two arrays that were recorded."""
    size = size_of(theirs)
    samples = list(zip(theirs.get("sample", ()), mine.get("sample", ()), strict=False))
    for index, (one, other) in enumerate(samples):
        position = int(index * (size - 1) / max(1, len(samples) - 1))
        yield f"element {position} of {size}", one, other


def distance(one: float, other: float) -> float:
    """Return ``|one - other|``: 0 for two NaN, infinite for one."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other)
    return math.inf if math.isnan(apart) else apart


def ulps_between(one: float, other: float, dtype: str) -> int | None:
    """Return how many steps from one number of ``dtype`` to the next lie between the two; none from 0.0 to -0.0.

    None for what is not finite, not a number of ``dtype``, or of a dtype other than floating-point ones of 16 to 64
    bits.
    """
    if dtype not in _FORMATS or not (math.isfinite(one) and math.isfinite(other)):
        return None
    positions = [_position(float(number), dtype) for number in (one, other)]
    return None if positions[0] is None or positions[1] is None else abs(positions[0] - positions[1])


def _position(number: float, dtype: str) -> int | None:
    """Return the number's position among all numbers of the dtype in ascending order, 0 at zero."""
    number_format, integer_format, missing = _FORMATS[dtype]
    try:
        packed = struct.pack(number_format, number)
    except OverflowError:
        return None
    (bits,) = struct.unpack(integer_format, packed)
    if bits < 0:
        bits = -(bits + (1 << (8 * len(packed) - 1)))
    return int(bits / (1 << missing)) if missing else bits
