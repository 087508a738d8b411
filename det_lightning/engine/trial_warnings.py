"""Likely mistakes in a trainable trial: parts without a wrapper, and names close to the names of hooks."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from det_lightning.distributed.backend import list_parameters
from det_lightning.pytorch._callback import PyTorchCallback
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext

_HOOKS = [name for name in vars(PyTorchCallback) if not name.startswith("_")]
# How similar a name is to a hook's, from 0 to 1: "on_train_end" is meant as a hook, "load_state" may be a helper.
_NEAR = 0.69
_NEARLY_EQUAL = 0.9
_MOST_NAMES = 5


@dataclasses.dataclass(frozen=True)
class WeightSums:
    """The sum of each parameter in the models or optimizers of a trial: changed sums show changed weights."""

    sums: list[float]

    @classmethod
    def take(cls, context: PyTorchTrialContext) -> WeightSums:
        """Return the current sums of this rank's parameters."""
        optimized = (parameter for optimizer in context.optimizers for parameter in list_parameters(optimizer))
        found = dict.fromkeys([*_list_parameters(context), *optimized])
        whole = [_get_local_part(parameter) for parameter in found if not (is_lazy(parameter) or parameter.is_meta)]
        # torch adds up no numbers of 8 bits, and MPS has none of 64.
        return cls(
            [
                float(part.sum(dtype=torch.float32 if part.device.type == "mps" else torch.float64))
                for part in whole
                if part.is_floating_point() and part.itemsize > 1
            ]
        )


def _get_local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter on this rank; a sharded parameter has other values elsewhere."""
    values = parameter.detach()
    values = values.to_local() if isinstance(values, DTensor) else values
    return torch.view_as_real(values) if values.is_complex() else values


def _list_parameters(context: PyTorchTrialContext) -> Iterator[torch.nn.Parameter]:
    return (parameter for model in context.models for parameter in model.parameters())


def find_unwrapped_parameters(trial: object, context: PyTorchTrialContext) -> Iterator[str]:
    """Yield a message for each wrapped optimizer that updates parameters of no wrapped model."""
    known = {*_list_parameters(context), *context.precision.scaling.masters}
    names = dict(_name_parameters(trial))
    for index, optimizer in enumerate(context.optimizers):
        unknown = [parameter for parameter in list_parameters(optimizer) if parameter not in known]
        if not unknown:
            continue
        shown = [names.get(parameter, f"one of shape {tuple(parameter.shape)}") for parameter in unknown[:_MOST_NAMES]]
        more = ", ..." if len(unknown) > _MOST_NAMES else ""
        yield (
            f"Optimizer {index}, a {type(optimizer).__name__}, updates {len(unknown)} parameters of no wrapped model: "
            f"{', '.join(shown)}{more}. The parameters are trained, but not saved in checkpoints and not exchanged "
            "between ranks. Pass their model through context.wrap_model() in the trial's __init__."
        )


def _name_parameters(trial: object) -> Iterator[tuple[torch.nn.Parameter, str]]:
    for attribute, value in vars(trial).items():
        if isinstance(value, torch.nn.Parameter):
            yield value, attribute
        for part in _list_parts(value):
            if isinstance(part, torch.nn.Module):
                yield from ((parameter, f"{attribute}.{name}") for name, parameter in part.named_parameters())


def _list_parts(value: Any) -> Iterable[Any]:
    """Return an attribute of a trial, or the items of a list, a tuple or a dict."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else [value]


def find_unwrapped_schedulers(trial: object, context: PyTorchTrialContext) -> Iterator[str]:
    """Yield a message for each scheduler of the trial, and for an optimizer with a scheduler elsewhere."""
    wrapped = [scheduler.scheduler for scheduler in context.lr_schedulers]
    kept = {
        id(part): (attribute, part)
        for attribute, value in vars(trial).items()
        for part in _list_parts(value)
        if isinstance(part, LRScheduler)
    }
    inner = [one for scheduler in (*wrapped, *(part for _, part in kept.values())) for one in _find_inner(scheduler)]
    for one in (*wrapped, *inner):
        kept.pop(id(one), None)
    for index, optimizer in enumerate(context.optimizers):
        unwrapped = [(attribute, part) for attribute, part in kept.values() if part.optimizer is optimizer]
        for attribute, part in unwrapped:
            yield _describe_scheduler(f"self.{attribute}, a {type(part).__name__},", index, optimizer)
        # A scheduler of another library may lack the attribute.
        is_scheduled = any(getattr(one, "optimizer", optimizer) is optimizer for one in (*wrapped, *inner))
        if not is_scheduled and not unwrapped and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            yield _describe_scheduler("A scheduler", index, optimizer)


def _find_inner(scheduler: Any) -> Iterator[LRScheduler]:
    """Yield the schedulers inside a scheduler, as in a ``SequentialLR``."""
    for value in getattr(scheduler, "__dict__", {}).values():
        for part in _list_parts(value):
            if isinstance(part, LRScheduler):
                yield part
                yield from _find_inner(part)


def _describe_scheduler(scheduler: str, index: int, optimizer: torch.optim.Optimizer) -> str:
    return (
        f"{scheduler} sets the learning rate of optimizer {index}, a {type(optimizer).__name__}, and is not wrapped: "
        "the run does not step the scheduler, and no checkpoint contains the scheduler. Pass the scheduler through "
        "context.wrap_lr_scheduler() in the trial's __init__."
    )


def find_near_hooks(callbacks: Mapping[str, PyTorchCallback], trial: object) -> Iterator[str]:
    """Yield a message for each method of a callback with nearly a hook's name, unless something calls the method."""
    for name, callback in callbacks.items():
        called = {*_list_called_names(type(callback)), *_list_called_names(type(trial))}
        for method in _list_own_methods(type(callback)):
            likeness = _NEAR if method.startswith("on_") else _NEARLY_EQUAL
            near = difflib.get_close_matches(method, _HOOKS, n=1, cutoff=likeness)
            if near and method not in called:
                yield (
                    f"Callback {name!r}, a {type(callback).__name__}, has a method {method}(), which a run does not "
                    f"call. Did you mean {near[0]}()?"
                )


def _list_own_methods(callback: type) -> list[str]:
    """Return the public methods of a callback's classes, except methods shared with a class of another library."""
    others = {name for base in callback.__mro__ if not issubclass(base, PyTorchCallback) for name in vars(base)}
    own = {
        name: None
        for base in callback.__mro__
        if issubclass(base, PyTorchCallback) and base is not PyTorchCallback
        for name, value in vars(base).items()
        if isinstance(value, types.FunctionType) and not name.startswith("_")
    }
    return [name for name in own if name not in _HOOKS and name not in others]


def _list_called_names(owner: type) -> Iterator[str]:
    """Yield the names used by the methods of a class, as far as known."""
    for base in owner.__mro__:
        for value in vars(base).values():
            if isinstance(value, types.FunctionType):
                yield from value.__code__.co_names
