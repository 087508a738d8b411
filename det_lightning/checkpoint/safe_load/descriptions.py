"""Descriptions that stand for the values of a pickle while it is looked through."""

from __future__ import annotations

import dataclasses
from typing import Any

#: No tensor has so many elements.
MAX_NUMEL = 2**60

# So many values are gone through in no time.
_MAX_VALUES = 1_000_000


@dataclasses.dataclass(frozen=True)
class NamedGlobal:
    """A class, function or constant that the pickle names."""

    full: str


@dataclasses.dataclass(eq=False)
class DescribedDict:
    """A dict, as keys and values one after another.

    Attributes:
        items: keys and values.
        ordered: it is an ``OrderedDict``, which can have attributes.
        attributes: values of those.
    """

    items: list[Any] = dataclasses.field(default_factory=list)
    ordered: bool = False
    attributes: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class DescribedStorage:
    """The memory of tensors.

    Attributes:
        itemsize: bytes of one element.
        nbytes: bytes of all of them.
    """

    itemsize: int
    nbytes: int


@dataclasses.dataclass(eq=False)
class DescribedTensor:
    """A tensor of any kind.

    Attributes:
        attributes: what was added to it.
    """

    attributes: Any = None


class CheckedElsewhere:
    """A value that is checked by those who make it: numpy's, or one of a class that the user declared safe."""


class PlainValue:
    """A value without parts that can be a key: bytes, a size, a device, a data type."""


def is_count(value: Any) -> bool:
    """Tell whether a value can be a number of elements."""
    return type(value) is int and 0 <= value < MAX_NUMEL


def shown(value: Any) -> str:
    """Return a short text for a value, which may have any size."""
    if isinstance(value, NamedGlobal):
        return value.full
    return f"{value!r:.100}" if isinstance(value, str) else _KINDS.get(type(value), f"a {type(value).__name__}")


def require_bounded(root: Any) -> None:
    """Raise if whoever goes through a value, as optimizers do, may never come to its end.

    A list that holds another one twice, which holds another one twice, and so on, takes few bytes.

    Raises:
        ValueError: the value holds itself, or the same parts far too often.
    """
    # Of each container the number of values in it, as often as they are met; 0 while that is being counted.
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
        raise ValueError("it holds the same values so often that nobody can go through them")


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
