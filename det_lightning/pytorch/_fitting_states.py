"""Whether the values in the state of an optimizer or a scheduler of torch are of the kinds that it computes with."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch

from det_lightning.masking import short_text

# Only of these classes is it known what they compute with.
_KNOWN = "torch.optim."
# torch's optimizers keep these for each parameter, with its shape; the buffer of SGD may also be None.
_OF_SHAPE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta")
_BUFFER = "momentum_buffer"
_FLAG = "true or false"


def require_fitting_scheduler(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` that names what the state of one of torch's schedulers has of another kind."""
    if type(scheduler).__module__.startswith(_KNOWN):
        _require_same_kinds(scheduler.state_dict(), saved)


def _require_same_kinds(own: Mapping[str, Any], saved: Mapping[str, Any], where: str = "") -> None:
    """Raise a ``ValueError`` that names each value of another kind than the object's own: a text for a number, say.

    A value may be left out. A function or None may be anything.
    """
    wrong = [
        f"{name!r}{where} should be {kind}; got {_show(saved[name])}"
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


def require_fitting_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` that names what the state of one of torch's optimizers has of another kind."""
    if not type(optimizer).__module__.startswith(_KNOWN):
        return
    groups = saved.get("param_groups") or []
    for index, (own, group) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        options = {name: value for name, value in own.items() if name != "params"}
        _require_same_kinds(options, group, f" of group {index}")
        for parameter, key in zip(own["params"], group.get("params", ()), strict=False):
            values = saved.get("state", {}).get(key, {})
            if not isinstance(values, Mapping):
                raise ValueError(f"the state of parameter {short_text(key)} should be a dict; got {_show(values)}")
            _require_fitting_tensors(values, parameter, key)


def _require_fitting_tensors(values: Mapping[str, Any], parameter: torch.Tensor, key: Any) -> None:
    of = f" of parameter {short_text(key)}"
    if "step" in values and _find_kind(values["step"]) != "a number":
        raise ValueError(f"'step'{of} should be a number; got {_show(values['step'])}")
    names = [name for name in _OF_SHAPE if name in values]
    for name in [*names, *([_BUFFER] if values.get(_BUFFER) is not None else [])]:
        value = values[name]
        # Parts of sharded tensors have the shape of the whole.
        if getattr(value, "shape", None) != parameter.shape:
            shape = list(parameter.shape)
            raise ValueError(f"{name!r}{of} should be a tensor of the shape {shape}; got {_show(value)}")


def _find_kind(value: Any) -> str | None:
    """Return what a value is, as far as a scheduler or optimizer computes with it; None if it may be anything."""
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


def _show(value: Any) -> str:
    return f"a tensor of the shape {list(value.shape)}" if isinstance(value, torch.Tensor) else short_text(value)
