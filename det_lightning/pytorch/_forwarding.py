"""Methods and attributes of an object that forward to a part of the object."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def forward(part: str, method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Return a method that calls ``method`` of the object in the attribute ``part``, with the same documentation."""
    find_part = operator.attrgetter(part)

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return method(find_part(self), *args, **kwargs)

    return call


def forward_attribute(part: str, name: str) -> Any:
    """Return a property, readable and settable: the attribute ``name`` of the object in the attribute ``part``."""
    find_part = operator.attrgetter(part)

    def assign(self: Any, value: Any) -> None:
        setattr(find_part(self), name, value)

    return property(operator.attrgetter(f"{part}.{name}"), assign, doc=f"``{part}.{name}``, readable and settable.")
