"""Callbacks that clip gradients, as older releases of Determined had them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from det_lightning.pytorch._callback import PyTorchCallback


class ClipGradsL2Norm(PyTorchCallback):
    """Scales an optimizer's gradients before each of its steps, so that their norm is at most a given one.

    For trials of old releases; today's pass ``clip_grads`` to ``context.step_optimizer()``.

    Args:
        clip_value: the largest L2 norm of all gradients of the optimizer together.
    """

    def __init__(self, clip_value: float) -> None:
        self._clip_value = clip_value

    def on_before_optimizer_step(self, parameters: Iterable[Any]) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, self._clip_value)


class ClipGradsL2Value(PyTorchCallback):
    """Limits every element of an optimizer's gradients before each of its steps.

    For trials of old releases; today's pass ``clip_grads`` to ``context.step_optimizer()``.

    Args:
        clip_value: the largest absolute value of an element.
    """

    def __init__(self, clip_value: float) -> None:
        self._clip_value = clip_value

    def on_before_optimizer_step(self, parameters: Iterable[Any]) -> None:
        torch.nn.utils.clip_grad_value_(parameters, self._clip_value)
