"""Checks of the saved states of optimizers, schedulers and scalers: kinds of values, shapes, finite numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch

from det_lightning.masking import short_text

# The checks know the computations of torch's classes only.
_KNOWN = "torch.optim."
# torch's optimizers keep these for each parameter, with its shape; the buffer of SGD may also be None.
_OF_SHAPE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta")
_BUFFER = "momentum_buffer"
_FLAG = "true or false"


def require_fitting_scheduler(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` that names the values in a scheduler's saved state that are of another kind than its own.

    Of schedulers other than torch's only ``last_epoch`` is checked.
    """
    _require_finite("'last_epoch'", saved.get("last_epoch", 0))
    if type(scheduler).__module__.startswith(_KNOWN):
        _require_same_kinds(scheduler.state_dict(), saved)


def require_fitting_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` that names values in an optimizer's saved state that the optimizer cannot compute with.

    Of optimizers other than torch's only the numbers that most optimizers have are checked.
    """
    groups = saved.get("param_groups") or []
    for index, group in enumerate(groups):
        if not isinstance(group, dict):
            raise ValueError(f"group {index} must be a dict; got a {type(group).__name__}")
        for name in ("lr", "initial_lr", "weight_decay", "momentum"):
            if group.get(name) is not None:
                _require_finite(f"{name!r} of group {index}", group[name])
    states = saved.get("state", {})
    if not isinstance(states, dict):
        raise ValueError(f"its state must be a dict; got a {type(states).__name__}")
    if not type(optimizer).__module__.startswith(_KNOWN):
        return
    for index, (own, group) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        options = {name: value for name, value in own.items() if name != "params"}
        _require_same_kinds(options, group, f" of group {index}")
        for parameter, key in zip(own["params"], group.get("params", ()), strict=False):
            _require_fitting_tensors(states.get(key, {}), parameter, short_text(key))


def require_fitting_scale(saved: Any) -> None:
    """Raise a ``ValueError`` unless the saved state of a gradient scaler is empty, or has a scale above 0."""
    if saved and not (_is_finite(saved["scale"]) and saved["scale"] > 0):
        raise ValueError(f"'scale' must be a number above 0; got {_show(saved['scale'])}")


def _require_same_kinds(own: Mapping[str, Any], saved: Mapping[str, Any], where: str = "") -> None:
    """Raise unless each saved value, if present, is of the kind of the object's own; functions may be anything."""
    wrong = [
        f"{name!r}{where} must be {kind}; got {_show(saved[name])}"
        for name, value in own.items()
        if name in saved and (kind := _find_kind(value)) is not None and not _is_of_kind(saved[name], value, kind)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def _is_of_kind(saved: Any, own: Any, kind: str) -> bool:
    if kind == _FLAG:  # torch itself has replaced flags by texts
        return isinstance(saved, bool | int | None) or saved == "deprecated"
    found = _find_kind(saved)
    is_list = kind == "a list" and found == "a list of numbers"
    return (found == kind or is_list) and (not isinstance(own, tuple) or len(saved) == len(own))


def _require_fitting_tensors(values: Any, parameter: torch.Tensor, key: str) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"the state of parameter {key} must be a dict; got {_show(values)}")
    if "step" in values and _find_kind(values["step"]) != "a number":
        raise ValueError(f"'step' of parameter {key} must be a number; got {_show(values['step'])}")
    names = [name for name in _OF_SHAPE if name in values]
    for name in [*names, *([_BUFFER] if values.get(_BUFFER) is not None else [])]:
        # Parts of sharded tensors have the shape of the whole.
        if getattr(values[name], "shape", None) != parameter.shape:
            expected = f"a tensor of the shape {list(parameter.shape)}"
            raise ValueError(f"{name!r} of parameter {key} must be {expected}; got {_show(values[name])}")


def _find_kind(value: Any) -> str | None:
    """Return the kind of a value in computations; None for a value that may be anything."""
    if isinstance(value, Mapping):
        return "a dict"
    if isinstance(value, list | tuple):
        are_numbers = bool(value) and all(_find_kind(one) == "a number" for one in value)
        return "a list of numbers" if are_numbers else "a list"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, bool):
        return _FLAG
    if isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return "a number"
    return None


def _require_finite(name: str, value: Any) -> None:
    if not _is_finite(value):
        raise ValueError(f"{name} must be a finite number; got {_show(value)}")


def _is_finite(value: Any) -> bool:
    """Return whether a value is a finite number, or a tensor or array with one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.device.type != "meta" and bool(torch.isfinite(value).all())
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        value = value.item()
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _show(value: Any) -> str:
    return f"a tensor of the shape {list(value.shape)}" if isinstance(value, torch.Tensor) else short_text(value)
