"""Methods and attributes that one object has from the objects that it is made of."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def forward(part: str, method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Return a method that calls ``method`` of the object that its own object has as the attribute ``part``.

    Signature and documentation are those of ``method``.
    """
    find_part = operator.attrgetter(part)

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return method(find_part(self), *args, **kwargs)

    return call


class ForwardedAttribute:
    """An attribute that can be read and set and is one of an object that its own object has as ``part``."""

    def __init__(self, part: str, name: str) -> None:
        self._find_part = operator.attrgetter(part)
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the attribute; on the class, this."""
        return self if instance is None else getattr(self._find_part(instance), self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        """Set the attribute."""
        setattr(self._find_part(instance), self._name, value)
