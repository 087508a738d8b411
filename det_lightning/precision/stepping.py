"""Stepping an optimizer unless its gradients overflowed, if possible without waiting for the device."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW

logger = logging.getLogger(__name__)

# Their fused implementations check a flag on the device themselves.
_WITH_FUSED = (Adam, AdamW, SGD, Adagrad)
_warned: set[type] = set()


class StepUnless:
    """Stands in for a gradient scaler once gradients are unscaled; ``overflow`` has the shape ``()``."""

    def __init__(self, overflow: torch.Tensor) -> None:
        self._overflow = overflow

    def step(self, optimizer: Any) -> None:
        """Step ``optimizer`` if the overflow is 0; otherwise leave parameters and state unchanged.

        A fused optimizer decides on the device. On a GPU, torch optimizers with a fused implementation are switched to
        it, unless the trial chose one with ``foreach=`` or ``fused=``. For any other the host waits for the flag.
        """
        if not _decides_on_device(optimizer):
            if self._overflow.is_cuda and type(optimizer) not in _warned:
                _warned.add(type(optimizer))
                logger.warning(
                    "%s cannot skip a step by itself when gradients overflow, so every step waits for the GPU. Adam, "
                    "AdamW, SGD and Adagrad of torch with fused=True do not need that.",
                    type(optimizer).__name__,
                )
            if not self._overflow.item():
                optimizer.step()
            return
        _begin_momentum(optimizer)
        # This is how torch's GradScaler passes it to a fused optimizer.
        optimizer.found_inf = self._overflow
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf


def _decides_on_device(optimizer: Any) -> bool:
    stepping = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
    groups = optimizer.param_groups
    if stepping not in _WITH_FUSED or not all(_can_fuse(group) for group in groups):
        return False
    for group in groups:
        if not group["fused"]:
            _fuse(optimizer, group)
    return True


def _can_fuse(group: dict[str, Any]) -> bool:
    if group.get("momentum") and group.get("dampening"):
        return False  # momentum must begin with a whole gradient, which a skipped first step lacks
    if group.get("fused") is not None:
        return bool(group["fused"])
    open_choice = group.get("foreach") is None and not group.get("differentiable") and "fused" in group
    return open_choice and all(
        p.is_cuda and p.is_floating_point() and (p.grad is None or not p.grad.is_sparse) for p in group["params"]
    )


def _fuse(optimizer: Any, group: dict[str, Any]) -> None:
    group["fused"] = True
    for parameter in group["params"]:
        step = optimizer.state.get(parameter, {}).get("step")
        if isinstance(step, torch.Tensor):
            optimizer.state[parameter]["step"] = step.to(parameter.device)


def _begin_momentum(optimizer: Any) -> None:
    """Create SGD's momentum before the first step, which would leave it undefined if skipped."""
    for parameter in (p for group in optimizer.param_groups if group.get("momentum") for p in group["params"]):
        state = optimizer.state[parameter]
        if parameter.grad is not None and state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
