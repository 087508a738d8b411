"""What is called around the backward passes and optimizer steps of a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_OptimizerHook = Callable[[torch.optim.Optimizer], Any]


class UpdateHooks:
    """Functions that a context calls in ``backward`` and ``step_optimizer``: none, unless a run adds some.

    Attributes:
        before_backward: called with the loss, as the trial passed it.
        after_backward: called without arguments.
        clip: called with the optimizer where the trial does not clip its gradients itself; they are those of all
            ranks, and unscaled.
        before_step: called with the optimizer; its gradients are those of all ranks, unscaled and clipped.
        after_step: called without arguments.
        before_zero_grad: called with the optimizer whose gradients the context is about to zero.
    """

    def __init__(self) -> None:
        self.before_backward: list[Callable[[torch.Tensor], Any]] = []
        self.after_backward: list[Callable[[], Any]] = []
        self.clip: list[_OptimizerHook] = []
        self.before_step: list[_OptimizerHook] = []
        self.after_step: list[Callable[[], Any]] = []
        self.before_zero_grad: list[_OptimizerHook] = []

    def clear(self) -> None:
        """Remove all of them."""
        self.before_backward.clear()
        self.after_backward.clear()
        self.clip.clear()
        self.before_step.clear()
        self.after_step.clear()
        self.before_zero_grad.clear()
