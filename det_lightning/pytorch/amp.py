"""Mixed precision as the context offers it: autocast around a model's forward pass."""

from __future__ import annotations

import logging
from typing import Any

import torch

__all__ = ["autocast_forward_pass"]

logger = logging.getLogger("det_lightning.pytorch")


def autocast_forward_pass(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Make the forward pass of ``model`` run under autocast and its half-precision outputs come back as float32.

    The model itself is changed and returned, so that parameters, hooks and attributes stay where they are.
    Where there is no CUDA device autocast changes nothing, as in Determined.
    """
    autocast = torch.amp.autocast("cuda", enabled=device.type == "cuda")
    plain_forward = model.forward
    warned_types: set[type] = set()

    def forward(*args: Any, **kwargs: Any) -> Any:
        with autocast:
            return plain_forward(*args, **kwargs)

    def end_half_precision(_module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        return _as_float(output, warned_types)

    model.forward = forward
    model.register_forward_hook(end_half_precision)
    return model


def _as_float(output: Any, warned_types: set[type]) -> Any:
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype == torch.float16 else output
    if isinstance(output, dict):
        return {key: _as_float(value, warned_types) for key, value in output.items()}
    if isinstance(output, list | tuple):
        values = [_as_float(value, warned_types) for value in output]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    if type(output) not in warned_types:
        warned_types.add(type(output))
        logger.warning("A model under AMP returned a %s; half precision inside it stays.", type(output).__name__)
    return output
