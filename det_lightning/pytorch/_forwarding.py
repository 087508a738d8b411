"""Methods and attributes that an object forwards to its parts."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def forward(part: str, method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Return a method that calls ``method`` of the object in the attribute ``part`` of ``self``.

    It has the signature and documentation of ``method``.
    """
    find_part = operator.attrgetter(part)

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return method(find_part(self), *args, **kwargs)

    return call


class ForwardedAttribute:
    """A readable and settable attribute that forwards to the object in the attribute ``part``."""

    def __init__(self, part: str, name: str) -> None:
        self._find_part = operator.attrgetter(part)
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the attribute, or on the class this descriptor."""
        return self if instance is None else getattr(self._find_part(instance), self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        """Set the attribute."""
        setattr(self._find_part(instance), self._name, value)
