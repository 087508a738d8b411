"""Descriptions that stand for the values of a pickle while it is checked."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

#: No tensor has so many elements.
MAX_NUMEL = 2**60
#: What a value in a container, or an argument, takes of the bytes that calls may copy. A file earns as much by the
#: least value in it, so it is refused only if the same values are used many times.
BYTES_OF_VALUE = 16

# Walking this many values takes no time.
_MAX_VALUES = 1_000_000
# Code that walks a value recurses as deep as it is nested, with up to three calls for each level.
_MAX_DEPTH = 150
# A dict key is a name or number, or a tuple of a few.
_MAX_KEY_PARTS = 256
# A dict compares keys that have the same hash one by one.
_MAX_SAME_HASH = 100


class CostlyError(ValueError):
    """Reading a file would take memory or time out of proportion to its size."""


@dataclasses.dataclass(frozen=True)
class NamedGlobal:
    """A class, function or constant that a pickle names."""

    full: str


class LongText(str):
    """A text that was not decoded, because only its length matters."""

    size: int
    __hash__ = object.__hash__  # its characters are not known

    def __new__(cls, size: int) -> LongText:
        text = super().__new__(cls, "(a long text)")
        text.size = size
        return text


@dataclasses.dataclass(eq=False, slots=True)
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
    """A tensor of any kind, with the attributes added to it, and the bytes of all its elements."""

    attributes: Any = None
    nbytes: int = 0


class CheckedElsewhere:
    """A value checked by the code that builds it: an array of numpy, or of a class that the user declared safe."""


@dataclasses.dataclass(eq=False)
class PlainValue:
    """A value without parts that can be a dict key: many bytes, a device."""

    size: int = 0


def is_count(value: Any) -> bool:
    """Return whether a value can be a number of elements."""
    return type(value) is int and 0 <= value < MAX_NUMEL


def weight(value: Any) -> int:
    """Return how many bytes a call copies if it copies this argument."""
    if isinstance(value, LongText | PlainValue):
        return value.size
    return len(value) if isinstance(value, str | bytes) else 0


def require_key(key: Any) -> None:
    """Raise unless a key is quick to hash; nested tuples can take arbitrarily long."""
    pending = [key]
    parts = 1
    while pending:
        part = pending.pop()
        if type(part) is tuple:
            parts += len(part)
            if parts > _MAX_KEY_PARTS:
                raise CostlyError("a key of a dict has too many parts")
            pending.extend(part)
        elif not isinstance(part, _KEYS):
            raise ValueError(f"{shown(part)} cannot be a key of a dict")


def require_fast_keys(keys: Iterable[Any]) -> None:
    """Raise a ``CostlyError`` if many keys have the same hash, which only numbers and tuples of numbers can have."""
    counts = Counter(map(hash, keys))
    if counts and max(counts.values()) > _MAX_SAME_HASH:
        raise CostlyError("the keys of a dict are made to be slow")


def shown(value: Any) -> str:
    """Return a short text for a value of any size."""
    if isinstance(value, NamedGlobal):
        return value.full
    return f"{value!r:.100}" if isinstance(value, str) else _KINDS.get(type(value), f"a {type(value).__name__}")


def require_bounded(root: Any) -> None:
    """Raise a ``CostlyError`` if walking a value, as optimizers do, may never end, or needs too many nested calls.

    A list that holds another list twice, which holds another list twice, and so on, takes few bytes.
    """
    # For each container the number of values in it, including repetitions; 0 while they are being counted.
    counts: dict[int, int] = {}
    # For each container of containers how deep it is.
    depths: dict[int, int] = {}
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
                raise CostlyError("it holds a value that holds itself")
            pending += [part for part in inner if id(part) not in counts]
            continue
        if counts[id(value)] == 0:
            counts[id(value)] = 1 + sum(counts.get(id(part), 1) for part in parts)
            if any(isinstance(part, _CONTAINERS) for part in parts):
                depths[id(value)] = 1 + max(depths.get(id(part), 0) for part in parts)
            if depths.get(id(value), 0) > _MAX_DEPTH:
                raise CostlyError(f"its values are nested more than {_MAX_DEPTH} levels deep")
        pending.pop()
    if counts[id(root)] > _MAX_VALUES + 10 * distinct:
        raise CostlyError("it holds the same values too often to be walked")


def _parts(value: Any) -> list[Any] | tuple[Any, ...]:
    if isinstance(value, DescribedDict):
        return value.items + value.attributes
    if isinstance(value, DescribedTensor):
        return [value.attributes]
    return value if isinstance(value, list | tuple) else ()


_KEYS = str | int | float | complex | bytes | np.generic | PlainValue | NamedGlobal | CheckedElsewhere | None
_CONTAINERS = (DescribedDict, DescribedTensor, list, tuple)
_KINDS = {
    DescribedDict: "a dict",
    DescribedStorage: "a storage",
    DescribedTensor: "a tensor",
    CheckedElsewhere: "a value of numpy or of a class",
    PlainValue: "a plain value",
}
