"""What is called around the backward passes and optimizer steps of a trial."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

_OptimizerHooks = list[Callable[[torch.optim.Optimizer], Any]]


@dataclasses.dataclass
class UpdateHooks:
    """Functions that a context calls in ``backward`` and ``step_optimizer``: none, unless a run adds some."""

    #: Called with the loss, as the trial passed it.
    before_backward: list[Callable[[torch.Tensor], Any]] = dataclasses.field(default_factory=list)
    after_backward: list[Callable[[], Any]] = dataclasses.field(default_factory=list)
    #: Called if the trial does not clip gradients itself, once these are exchanged and unscaled.
    clip: _OptimizerHooks = dataclasses.field(default_factory=list)
    #: Called once gradients are exchanged, unscaled and clipped.
    before_step: _OptimizerHooks = dataclasses.field(default_factory=list)
    after_step: list[Callable[[], Any]] = dataclasses.field(default_factory=list)
    #: Called before the context zeroes the gradients of an optimizer.
    before_zero_grad: _OptimizerHooks = dataclasses.field(default_factory=list)

    def clear(self) -> None:
        """Remove all hooks."""
        for functions in vars(self).values():
            functions.clear()
