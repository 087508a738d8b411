"""Weights in half precision, and the float32 masters that optimizers update in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["cast_weights", "keep_masters", "replace_parameters"]


def cast_weights(
    model: torch.nn.Module,
    dtype: torch.dtype,
    keep_batchnorm: bool,
    cast: dict[torch.nn.Parameter, torch.nn.Parameter],
) -> None:
    """Give ``model`` new parameters of another type, and cast its floating-point buffers.

    The former parameters live on, for an optimizer that has them. Those that are shared stay shared.

    Args:
        model: is changed.
        dtype: what floating-point parameters become.
        keep_batchnorm: leave batch norms as they are.
        cast: which parameters were cast already, and into which; is added to.
    """
    for module in model.modules():
        if keep_batchnorm and isinstance(module, _BatchNorm):
            continue
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_floating_point() and parameter.dtype is not dtype:
                if parameter not in cast:
                    cast[parameter] = torch.nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                setattr(module, name, cast[parameter])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def replace_parameters(optimizer: torch.optim.Optimizer, cast: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
    """Make ``optimizer`` update the parameters that took the place of its own, and cast its state like them."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            group["params"][index] = new = cast.get(parameter, parameter)
            if new is not parameter and parameter in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(parameter)
    # An optimizer casts what it loads to the types of its parameters.
    optimizer.load_state_dict(optimizer.state_dict())


def keep_masters(model: torch.nn.Module, masters: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
    """Make the state of ``model`` one in float32, with the values of the masters: nothing is lost in a checkpoint.

    Loading such a state, or that of a model in any precision, sets masters and weights.

    Args:
        model: some of its parameters are in half precision.
        masters: the float32 parameter of each of those that has one.
    """

    def in_float32(module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, tensor in _named_tensors(module):
            if prefix + name in state and tensor.is_floating_point():
                state[prefix + name] = masters.get(tensor, tensor).detach().float()  # type: ignore[call-overload]

    def set_masters(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, tensor in _named_tensors(module):
            saved, master = state.get(prefix + name), masters.get(tensor)  # type: ignore[call-overload]
            if master is not None and saved is not None and saved.shape == master.shape:
                with torch.no_grad():
                    master.copy_(saved)

    model.register_state_dict_post_hook(in_float32)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(set_masters)  # type: ignore[no-untyped-call]


def _named_tensors(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
