"""Descriptions that stand for the values of a pickle while it is checked."""

from __future__ import annotations

import dataclasses
from typing import Any

#: No tensor has so many elements.
MAX_NUMEL = 2**60

# Walking this many values takes no time.
_MAX_VALUES = 1_000_000


@dataclasses.dataclass(frozen=True)
class NamedGlobal:
    """A class, function or constant that a pickle names."""

    full: str


@dataclasses.dataclass(eq=False)
class DescribedDict:
    """A dict: its keys and values in turn, and the values of the attributes that an ``OrderedDict`` can have."""

    items: list[Any] = dataclasses.field(default_factory=list)
    ordered: bool = False
    attributes: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class DescribedStorage:
    """The memory of tensors: the bytes of one element, and of all."""

    itemsize: int
    nbytes: int


@dataclasses.dataclass(eq=False)
class DescribedTensor:
    """A tensor of any kind, with the attributes added to it."""

    attributes: Any = None


class CheckedElsewhere:
    """A value checked by the code that builds it: numpy's, or of a class that the user declared safe."""


class PlainValue:
    """A value without parts that can be a dict key: bytes, a device, a complex number."""


def is_count(value: Any) -> bool:
    """Return whether a value can be a number of elements."""
    return type(value) is int and 0 <= value < MAX_NUMEL


def shown(value: Any) -> str:
    """Return a short text for a value of any size."""
    if isinstance(value, NamedGlobal):
        return value.full
    return f"{value!r:.100}" if isinstance(value, str) else _KINDS.get(type(value), f"a {type(value).__name__}")


def require_bounded(root: Any) -> None:
    """Raise a ``ValueError`` if walking a value, as optimizers do, may never end.

    A list that holds another list twice, which holds another list twice, and so on, takes few bytes.
    """
    # For each container the number of values in it, including repetitions; 0 while they are being counted.
    counts: dict[int, int] = {}
    pending = [root]
    distinct = 0
    while pending:
        value = pending[-1]
        parts = _parts(value)
        if id(value) not in counts:
            counts[id(value)] = 0
            distinct += 1 + len(parts)
            inner = [part for part in parts if isinstance(part, _CONTAINERS)]
            if any(counts.get(id(part)) == 0 for part in inner):
                raise ValueError("it holds a value that holds itself")
            pending += [part for part in inner if id(part) not in counts]
            continue
        if counts[id(value)] == 0:
            counts[id(value)] = 1 + sum(counts.get(id(part), 1) for part in parts)
        pending.pop()
    if counts[id(root)] > _MAX_VALUES + 10 * distinct:
        raise ValueError("it holds the same values too often to be walked")


def _parts(value: Any) -> list[Any] | tuple[Any, ...]:
    if isinstance(value, DescribedDict):
        return value.items + value.attributes
    if isinstance(value, DescribedTensor):
        return [value.attributes]
    return value if isinstance(value, list | tuple) else ()


_CONTAINERS = (DescribedDict, DescribedTensor, list, tuple)
_KINDS = {
    DescribedDict: "a dict",
    DescribedStorage: "a storage",
    DescribedTensor: "a tensor",
    CheckedElsewhere: "a value of numpy or of a class",
    PlainValue: "a plain value",
}
