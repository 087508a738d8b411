"""Initial weights, as older releases of Determined let trials draw them."""

from __future__ import annotations

import torch


def reset_parameters(model: torch.nn.Module) -> None:
    """Draw new weights for a model, by the ``reset_parameters()`` of each module that has one, inner ones first.

    For trials of old releases: torch draws the weights of a module when it is made.
    """
    model.apply(_reset)


def _reset(module: torch.nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
