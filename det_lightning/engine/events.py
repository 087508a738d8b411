"""The callbacks of a trial, called in the order of ``build_callbacks()``."""

from __future__ import annotations

import functools
import inspect
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from det_lightning.distributed.backend import list_parameters
from det_lightning.escaping import get_logger
from det_lightning.pytorch._callback import PyTorchCallback
from det_lightning.pytorch._wrapped_parts import UpdateHooks

logger = get_logger(__name__)

_REPLACED = {
    "on_checkpoint_end": "on_checkpoint_write_end",
    "on_before_optimizer_step": "step_optimizer(clip_grads=...)",
    "on_validation_step_start": "on_validation_start",
    "on_validation_step_end": "on_validation_end",
}


def overrides(instance: object, base: type, method: str) -> bool:
    """Return whether ``instance`` replaces the ``method`` of ``base``, in the class or as an attribute set later."""
    found = getattr(instance, method)
    return getattr(found, "__func__", found) is not getattr(base, method)


class TrialEvents:
    """Passes the events of a run to a trial's callbacks, a dict of ``PyTorchCallback`` by name."""

    def __init__(self, callbacks: dict[str, PyTorchCallback]) -> None:
        if not isinstance(callbacks, dict):
            raise TypeError(f"build_callbacks() must return a dict of callbacks by name; got {callbacks!r}.")
        wrong = {name: c for name, c in callbacks.items() if not isinstance(c, PyTorchCallback)}
        if wrong:
            raise TypeError(f"build_callbacks() must return PyTorchCallback objects of det_lightning; got {wrong}.")
        self.callbacks = callbacks
        self._epoch_starts = [
            (callback, bool(inspect.signature(callback.on_training_epoch_start).parameters))
            for callback in callbacks.values()
        ]
        wants_written = self.find_overrides("on_checkpoint_end") or self.find_overrides("on_checkpoint_write_end")
        #: Called with the directory of a written checkpoint; None if no callback looks.
        self.report_written = self._report_written if wants_written else None
        self._warn_of_old_spellings()

    def _warn_of_old_spellings(self) -> None:
        for name, callback in self.callbacks.items():
            for old, new in _REPLACED.items():
                if overrides(callback, PyTorchCallback, old):
                    warnings.warn(
                        f"Callback {name!r} overrides {old}, which is deprecated; use {new} instead.",
                        FutureWarning,
                        stacklevel=2,
                    )

    def find_overrides(self, method: str) -> list[Any]:
        """Return the bound methods of the callbacks with an own ``method``."""
        callbacks = self.callbacks.values()
        return [getattr(one, method) for one in callbacks if overrides(one, PyTorchCallback, method)]

    def attach(self, hooks: UpdateHooks) -> None:
        """Register each ``on_before_optimizer_step``, called with an optimizer's parameters as in Determined 0.13."""
        for method in self.find_overrides("on_before_optimizer_step"):
            hooks.before_step.append(functools.partial(_call_with_parameters, method))

    def emit(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call ``method`` of every callback."""
        for callback in self.callbacks.values():
            getattr(callback, method)(*args, **kwargs)

    def _report_written(self, directory: pathlib.Path) -> None:
        """Call each callback's ``on_checkpoint_write_end``, after ``on_checkpoint_end``, the older name."""
        for callback in self.callbacks.values():
            callback.on_checkpoint_end(str(directory))
            callback.on_checkpoint_write_end(str(directory))

    def start_epoch(self, epoch_idx: int) -> None:
        """Call ``on_training_epoch_start``, also in the old form without an argument."""
        for callback, takes_epoch in self._epoch_starts:
            if takes_epoch:
                callback.on_training_epoch_start(epoch_idx)
            else:
                logger.warning(
                    "%s.on_training_epoch_start() does not take epoch_idx; add the argument.", type(callback).__name__
                )
                callback.on_training_epoch_start()  # type: ignore[call-arg]


def _call_with_parameters(method: Callable[[Any], Any], optimizer: torch.optim.Optimizer) -> None:
    method(list_parameters(optimizer))
