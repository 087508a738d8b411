"""Changing models and optimizers as one of apex's levels requires."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from det_lightning import errors
from det_lightning.distributed.backend import Backend
from det_lightning.distributed.weight_cast import WeightCast, named_tensors
from det_lightning.precision.casting import CastingForward, floats_of, halves_to_float
from det_lightning.precision.levels import HALF_TYPES, Level

_T = TypeVar("_T")


def listed(name: str, given: Any, kind: type[_T]) -> list[_T]:
    """Return as a list what was given as the argument ``name``, alone or in a list or tuple."""
    found = list(given) if isinstance(given, list | tuple) else [given]
    if wrong := [f"{item!r:.80} of type {type(item).__name__}" for item in found if not isinstance(item, kind)]:
        raise errors.InvalidExperimentException(
            f"configure_apex_amp({name}=...) takes a {kind.__module__}.{kind.__name__} or a list of them; got "
            f"{', '.join(wrong)}."
        )
    return found


def check_parts(
    models: list[torch.nn.Module],
    optimizers: list[torch.optim.Optimizer],
    wrapped_models: list[torch.nn.Module],
    wrapped_optimizers: list[torch.optim.Optimizer],
) -> None:
    """Raise if models and optimizers cannot be configured; the message names all reasons.

    One of them is not wrapped, an optimizer has no parameters of the models, or a model is already in half precision.
    """
    mistakes = [
        f"model {index} ({type(model).__name__}) was not wrapped: pass what wrap_model() returned"
        for index, model in enumerate(models)
        if uncompiled(model) not in map(uncompiled, wrapped_models)
    ]
    own = {parameter for model in models for parameter in model.parameters()}
    for index, optimizer in enumerate(optimizers):
        name = f"optimizer {index} ({type(optimizer).__name__})"
        if optimizer not in wrapped_optimizers:
            mistakes.append(f"{name} was not wrapped: pass what wrap_optimizer() returned")
        elif own.isdisjoint(parameter for group in optimizer.param_groups for parameter in group["params"]):
            mistakes.append(
                f"{name} has no parameters of the {len(own)} that the given models have: give the models that it "
                "trains too, and make it from the parameters of what wrap_model() returned"
            )
    mistakes += [
        f"parameter {name!r} of model {index} ({type(model).__name__}) is of type {parameter.dtype} already: give "
        "models in float32, and leave .half() to configure_apex_amp()"
        for index, model in enumerate(models)
        for name, parameter in [(n, p) for n, p in model.named_parameters() if p.dtype in HALF_TYPES][:1]
    ]
    if mistakes:
        raise errors.InvalidExperimentException("configure_apex_amp(): " + "; ".join(mistakes) + ".")


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model that ``torch.compile`` was given, or ``model`` itself."""
    inner: torch.nn.Module = getattr(model, "_orig_mod", model)  # torch has no public name for it
    return inner


def wrapped_ones(models: list[torch.nn.Module], wrapped: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the models that were wrapped; the given ones may have been compiled since."""
    by_inner = {uncompiled(model): model for model in wrapped}
    return [by_inner[uncompiled(model)] for model in models]


def apply_level(
    level: Level, backend: Backend, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]
) -> tuple[dict[torch.nn.Module, torch.nn.Module], dict[torch.nn.Parameter, torch.nn.Parameter]]:
    """Cast models, and their inputs and outputs.

    Return for each model the one to train in its place, and the float32 master of each parameter in half precision.
    """
    changed = models
    halves: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    if level.weights_type is not None:
        casting = WeightCast(level.weights_type, bool(level.keep_batchnorm_fp32))
        changed = [backend.placement.cast_weights(model, casting) for model in models]
        halves = casting.halves
    masters = {}
    if level.master_weights:
        masters = {half: master for master, half in halves.items()}
        for model in changed:
            _keep_masters(model, masters)
    elif halves:
        for optimizer in optimizers:
            backend.placement.replace_parameters(optimizer, halves)
    for model in changed:
        _surround(model, level, backend.device)
    return dict(zip(models, changed, strict=True)), masters


def _keep_masters(model: torch.nn.Module, masters: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
    """Make ``model`` return a float32 state with the values of the masters, so that a checkpoint loses nothing.

    Loading such a state, or that of a model in any precision, sets masters and weights. ``masters`` maps parameters in
    half precision to float32 ones of the same shapes.
    """

    def in_float32(module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, tensor in named_tensors(module):
            if prefix + name in state and tensor.is_floating_point():
                state[prefix + name] = masters.get(tensor, tensor).detach().float()  # type: ignore[call-overload]

    def set_masters(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, tensor in named_tensors(module):
            saved = state.get(prefix + name)
            master = masters.get(tensor)  # type: ignore[call-overload]
            if master is not None and saved is not None and saved.shape == master.shape:
                with torch.no_grad():
                    master.copy_(saved)

    model.register_state_dict_post_hook(in_float32)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(set_masters)  # type: ignore[no-untyped-call]


def _surround(model: torch.nn.Module, level: Level, device: torch.device) -> None:
    inputs = None if level.weights_type is None else floats_of(level.weights_type)
    outputs = halves_to_float if level.uses_half_precision else None
    if level.cast_model_outputs is not None:
        outputs = floats_of(level.cast_model_outputs)
    half = torch.bfloat16 if device.type == "cpu" else torch.float16
    autocast = (device.type, half) if level.patch_torch_functions else None
    if inputs or outputs or autocast:
        model.forward = CastingForward(model.forward, inputs, outputs, autocast)


def put_back(given: Any, wrapped: list[torch.nn.Module], changed: dict[torch.nn.Module, torch.nn.Module]) -> Any:
    """Return ``given``, a model or a container of models, with each ``wrapped`` one replaced as ``changed`` says."""
    alone = isinstance(given, torch.nn.Module)
    results = []
    for model, inner in zip([given] if alone else given, wrapped, strict=True):
        outer = changed[inner]
        if model is not inner and outer is not inner:
            raise errors.InvalidExperimentException(
                f"configure_apex_amp() makes another {type(inner).__name__}, with new parameters, and it was compiled "
                "after wrap_model(). Compile it before wrap_model(), or after configure_apex_amp()."
            )
        results.append(outer if model is inner else model)
    return results[0] if alone else type(given)(results)
