"""Hooks in which a module drives its trial, and which work even if a subclass overrides them without ``super()``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import pytorch_lightning as pl

from det_lightning import errors

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def needed(instead: str = "") -> Callable[[_Hook], _Hook]:
    """Mark a hook that a module cannot do without.

    An override in a subclass that does not call it is followed by it; or an error says what to do ``instead``.
    """

    def mark(hook: _Hook) -> _Hook:
        @functools.wraps(hook)
        def noted(self: DrivenModule, *args: Any, **kwargs: Any) -> Any:
            self.called_hooks.add(hook.__name__)
            return hook(self, *args, **kwargs)

        noted.instead = instead  # type: ignore[attr-defined]
        return noted  # type: ignore[return-value]

    return mark


def _is_needed(attribute: Any) -> bool:
    return hasattr(attribute, "instead")


class DrivenModule(pl.LightningModule):
    """A module with hooks that are :func:`needed`.

    Attributes:
        called_hooks: the names of the needed hooks that were called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called_hooks: set[str] = set()

    @classmethod
    def needed_hooks(cls) -> dict[str, Any]:
        """Return the hooks that are needed, by name, as the class that drives the trial has them."""
        return {name: hook for base in cls.__mro__[::-1] for name, hook in vars(base).items() if _is_needed(hook)}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Complete what the class, or a mixin that it derives from, overrides."""
        super().__init_subclass__(**kwargs)
        for name, hook in cls.needed_hooks().items():
            owner = next(base for base in cls.__mro__ if name in vars(base))
            is_new = owner is cls or not issubclass(owner, DrivenModule)
            if is_new and not _is_needed(vars(owner)[name]):
                setattr(cls, name, _completed(vars(owner)[name], hook))


def _completed(override: Any, hook: Any) -> Callable[..., Any]:
    """Return ``override``, followed by ``hook`` unless it has called that."""
    name = hook.__name__

    @functools.wraps(override)
    def completed(self: DrivenModule, *args: Any, **kwargs: Any) -> Any:
        self.called_hooks.discard(name)
        method = override.__get__(self, type(self)) if hasattr(override, "__get__") else override
        result = method(*args, **kwargs)
        if name in self.called_hooks:
            return result
        if hook.instead:
            raise errors.InvalidExperimentException(
                f"{type(self).__name__}.{name}() does not call super().{name}(), which a trial needs: {hook.instead}."
            )
        hook(self, *args, **kwargs)
        return result

    # Lightning looks for a step's parameters below one decorator, not below those of the override.
    completed.__wrapped__ = inspect.unwrap(override)
    return completed
