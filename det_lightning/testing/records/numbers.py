"""Distances of floating-point numbers, also in units in the last place of a dtype."""

from __future__ import annotations

import math
import struct

__all__ = ["distance", "ulps_between"]

#: Format of the number and of the integer with the same bits, and the bits that the dtype lacks at the lower end.
_FORMATS = {
    "float16": ("<e", "<h", 0),
    "bfloat16": ("<f", "<i", 16),
    "float32": ("<f", "<i", 0),
    "float64": ("<d", "<q", 0),
    "float": ("<d", "<q", 0),
}


def distance(one: float, other: float) -> float:
    """Return ``|one - other|``: 0 for two NaN, infinite for one."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other)
    return math.inf if math.isnan(apart) else apart


def ulps_between(one: float, other: float, dtype: str) -> int | None:
    """Return how many steps from one number of ``dtype`` to the next lie between the two.

    None for what is not finite, not a number of ``dtype``, or of a dtype that is no floating-point one of 16 to 64
    bits. 0.0 and -0.0 are no step apart.
    """
    if dtype not in _FORMATS or not (math.isfinite(one) and math.isfinite(other)):
        return None
    places = [_place(float(number), dtype) for number in (one, other)]
    return None if places[0] is None or places[1] is None else abs(places[0] - places[1])


def _place(number: float, dtype: str) -> int | None:
    """Return the number's place among all numbers of the dtype in ascending order, 0 at zero."""
    number_format, integer_format, missing = _FORMATS[dtype]
    try:
        packed = struct.pack(number_format, number)
    except OverflowError:
        return None
    (bits,) = struct.unpack(integer_format, packed)
    if bits < 0:
        bits = -(bits + (1 << (8 * len(packed) - 1)))
    return int(bits / (1 << missing)) if missing else bits
