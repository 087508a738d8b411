"""Context managers whose errors name a missing ``with`` statement."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NoReturn, ParamSpec, TypeVar

from det_lightning.core._task import current_task
from det_lightning.tracebacks import shorten_traceback

_P = ParamSpec("_P")
_T = TypeVar("_T")


class OnlyInWith(contextlib.AbstractContextManager[_T]):
    """A context manager; using it without a ``with`` statement raises an error that shows one, ``example``."""

    def __init__(self, opened: contextlib.AbstractContextManager[_T], example: str) -> None:
        self._opened = opened
        self._example = example

    def __enter__(self) -> _T:
        try:
            return self._opened.__enter__()
        except BaseException as error:
            if current_task() is None:
                shorten_traceback(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._opened.__exit__(kind, error, traceback)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name!r} was used outside of a with statement. {self._way_out()}")

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(f"It was unpacked, or used as a path, outside of a with statement. {self._way_out()}")

    __iter__ = __fspath__ = __truediv__ = _refuse

    def _way_out(self) -> str:
        return f"Write `{vars(self).get('_example')}:` and use the result inside."


def for_with_statement(example: str) -> Callable[[Callable[_P, Iterator[_T]]], Callable[_P, OnlyInWith[_T]]]:
    """Make a generator function open a context, as ``contextlib.contextmanager`` does; see :class:`OnlyInWith`."""

    def decorate(function: Callable[_P, Iterator[_T]]) -> Callable[_P, OnlyInWith[_T]]:
        opening = contextlib.contextmanager(function)

        @functools.wraps(function)
        def open_context(*args: _P.args, **kwargs: _P.kwargs) -> OnlyInWith[_T]:
            return OnlyInWith(opening(*args, **kwargs), example)

        return open_context

    return decorate
