"""Callbacks and functions of older releases of Determined."""

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


def reset_parameters(model: torch.nn.Module) -> None:
    """Draw new weights for a model, by the ``reset_parameters()`` of each module that has one, inner ones first.

    For trials of old releases: torch draws the weights of a module when it is made.
    """
    model.apply(_reset)


def _reset(module: torch.nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
