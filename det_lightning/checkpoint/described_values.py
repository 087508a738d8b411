"""Descriptions that stand for the values of a pickle while it is looked through."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = [
    "MAX_NUMEL",
    "CheckedElsewhere",
    "DescribedDict",
    "DescribedStorage",
    "DescribedTensor",
    "NamedGlobal",
    "PlainValue",
    "is_count",
    "shown",
]

#: No tensor has so many elements.
MAX_NUMEL = 2**60


@dataclasses.dataclass(frozen=True)
class NamedGlobal:
    """A class, function or constant that the pickle names."""

    full: str


@dataclasses.dataclass(eq=False)
class DescribedDict:
    """A dict, as keys and values one after another."""

    items: list[Any] = dataclasses.field(default_factory=list)
    ordered: bool = False


@dataclasses.dataclass(eq=False)
class DescribedStorage:
    """The memory of tensors.

    Attributes:
        itemsize: bytes of one element.
        nbytes: bytes of all of them.
    """

    itemsize: int
    nbytes: int


class DescribedTensor:
    """A tensor of any kind."""


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
    return f"{value!r:.100}" if isinstance(value, str) else type(value).__name__.strip("_").lower()
