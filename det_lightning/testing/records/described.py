"""Values as the recorder describes them: telling, showing and comparing them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from det_lightning.testing.records.difference import Tolerance
from det_lightning.testing.records.numbers import distance

__all__ = ["dtype_of", "farthest_apart", "is_array", "is_plain", "largest_element", "summary_of"]


def is_array(value: Any) -> bool:
    """Tell whether the value was an array or a tensor."""
    return isinstance(value, dict) and value.get("~") == "array"


def is_plain(value: Any) -> bool:
    """Tell whether the value was a dict."""
    return isinstance(value, dict) and "~" not in value


def dtype_of(value: Any) -> str:
    """Return the dtype, or the name of the type in Python."""
    return str(value["dtype"]) if isinstance(value, dict) else type(value).__name__


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


def largest_element(arrays: Iterable[Any]) -> float:
    """Return the largest absolute value in arrays; 0 where there is none."""
    return max((abs(array.get(end, 0.0)) for array in arrays for end in ("minimum", "maximum")), default=0.0)


def farthest_apart(
    theirs: Any, mine: Any, tolerance: Tolerance, scale: float, *, as_weights: bool
) -> tuple[str, float, float] | None:
    """Return what lies farthest apart of two arrays of one shape, and both values; None for what is allowed.

    Elements go before statistics.

    Args:
        theirs: an array as it was described.
        mine: the other one.
        tolerance: what is allowed.
        scale: what the tolerance is relative to, if that is larger than the values.
        as_weights: look at the norm and at what half of the elements have in common only.
    """
    elements = list(_elements(theirs, mine))
    outside = [found for found in elements if not tolerance.allows(*found[1:], scale)]
    if as_weights and 2 * len(outside) < len(elements):
        outside = []
    statistics = [
        found
        for found in _statistics(theirs, mine)
        if not (as_weights and found[0] != "norm")
        and not tolerance.allows(*found[1:], scale * math.sqrt(_size(theirs)) if found[0] == "norm" else scale)
    ]
    return max(outside or statistics, key=lambda found: distance(*found[1:]), default=None)


def _statistics(theirs: Any, mine: Any) -> Iterator[tuple[str, float, float]]:
    for name in ("norm", "mean", "minimum", "maximum"):
        if name in theirs and name in mine:
            yield name, theirs[name], mine[name]


def _elements(theirs: Any, mine: Any) -> Iterator[tuple[str, float, float]]:
    size = _size(theirs)
    samples = list(zip(theirs.get("sample", ()), mine.get("sample", ()), strict=False))
    for index, (one, other) in enumerate(samples):
        place = int(index * (size - 1) / max(1, len(samples) - 1))
        yield f"element {place} of {size}", one, other


def _size(array: Any) -> int:
    return math.prod(array["shape"])
