"""Weights that are not numbers: a training went wrong, and whoever loads them should know."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["warn_of_nan"]

logger = logging.getLogger("det_lightning.checkpoint")

_FEW = 5


def warn_of_nan(state: Mapping[str, Any], source: str) -> None:
    """Log a warning that names weights which hold NaN.

    Args:
        state: content of ``state_dict.pth``, of any release.
        source: where it was read.
    """
    models = state.get("models_state_dict", [state.get("model_state_dict")])
    found = [
        f"{name} of model {index}"
        for index, weights in enumerate(models if isinstance(models, list) else [])
        if isinstance(weights, Mapping)
        for name, value in weights.items()
        if isinstance(value, torch.Tensor) and _has_nan(value)
    ]
    if found:
        more = f" and {len(found) - _FEW:,} more" if len(found) > _FEW else ""
        logger.warning("%s holds weights that are NaN: %s%s.", source, f"{', '.join(found[:_FEW]):.500}", more)


def _has_nan(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor holds NaN. A sum takes no memory, and mostly says that there is none."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    flat = tensor.detach()
    if flat.numel() * flat.element_size() > flat.untyped_storage().nbytes():
        return False  # the same few numbers again and again
    if flat.element_size() == 1:  # in eight bits torch computes nothing
        flat = flat.to(torch.float32)
    return bool(flat.sum().isnan()) and bool(flat.isnan().any())
