"""Decides what apex's levels ``O0`` to ``O3`` mean: the properties, models and optimizers of ``configure_apex_amp``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import torch

from det_lightning import errors
from det_lightning.arguments import describe
from det_lightning.escaping import get_logger

logger = get_logger(__name__)

_T = TypeVar("_T")

HALF_TYPES = (torch.float16, torch.bfloat16)

DYNAMIC = "dynamic"

#: The properties of each level, from apex's documentation.
_LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"cast_model_type": torch.float32, "loss_scale": 1.0},
    "O1": {"patch_torch_functions": True, "loss_scale": DYNAMIC},
    "O2": {
        "cast_model_type": torch.float16,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": DYNAMIC,
    },
    "O3": {"cast_model_type": torch.float16, "keep_batchnorm_fp32": False, "loss_scale": 1.0},
}


_A_TYPE = "a floating-point torch.dtype, such as torch.float16, or None"
# The valid values of each property, for messages.
_EXPECTED = {
    "cast_model_type": _A_TYPE,
    "patch_torch_functions": "True, False or None",
    "keep_batchnorm_fp32": "True, False, 'True', 'False' or None",
    "master_weights": "True, False or None",
    "loss_scale": "a number above 0, such a number as a string, or 'dynamic'",
    "cast_model_outputs": _A_TYPE,
    "num_losses": "an int of at least 1",
    "min_loss_scale": "a number above 0",
    "max_loss_scale": "a number above 0",
}


@dataclasses.dataclass(frozen=True)
class Level:
    """A level with all properties resolved; the properties are arguments of ``configure_apex_amp``.

    ``cast_model_type=None`` leaves weights and inputs unchanged. ``cast_model_outputs=None`` casts outputs in half
    precision to float32.
    """

    opt_level: str
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool = False
    loss_scale: float | str = 1.0
    cast_model_outputs: torch.dtype | None = None
    num_losses: int = 1
    min_loss_scale: float | None = None
    max_loss_scale: float | None = None

    @property
    def weights_type(self) -> torch.dtype | None:
        """The type to cast weights to; None for float32."""
        return None if self.cast_model_type is torch.float32 else self.cast_model_type

    @property
    def uses_half_precision(self) -> bool:
        """Whether anything is computed in half precision."""
        return self.patch_torch_functions or self.weights_type is not None

    @property
    def scales(self) -> bool:
        """Whether each backward pass has extra work: losses are scaled, or gradients go to master weights."""
        return self.loss_scale != 1.0 or self.master_weights

    def on_device(self, device: torch.device) -> Level:
        """Return the level for a device; on the CPU bfloat16 replaces float16."""
        if device.type != "cpu" or not self.uses_half_precision:
            return self
        logger.warning(
            "configure_apex_amp(opt_level=%r) on the CPU: bfloat16 takes the place of float16. Losses are scaled as on "
            "a GPU; numbers are coarser, and nothing gets faster.",
            self.opt_level,
        )
        types = {"cast_model_type": self.cast_model_type, "cast_model_outputs": self.cast_model_outputs}
        halved = {name: torch.bfloat16 for name, dtype in types.items() if dtype is torch.float16}
        return dataclasses.replace(self, **halved)  # type: ignore[arg-type]


def resolve_level(opt_level: Any, overrides: dict[str, Any]) -> Level:
    """Return a level with its properties overridden."""
    if opt_level not in _LEVELS:
        raise errors.InvalidExperimentException(
            f"configure_apex_amp() takes the levels 'O0', 'O1', 'O2' and 'O3', with the letter O; got {opt_level!r}."
        )
    mistakes: list[str] = []
    given = {name: value for name, value in overrides.items() if value is not None}
    if opt_level == "O1":
        mistakes += _clashes_with_autocast(given)
    elif given.get("patch_torch_functions"):
        mistakes.append("patch_torch_functions=True goes with opt_level='O1' only; leave it out, or use 'O1'")
    values: dict[str, Any] = {}
    for name, value in given.items():
        try:
            values[name] = _parse_property(name, value)
        except (TypeError, ValueError):
            mistakes.append(f"{name}={value!r}, which must be {_EXPECTED[name]}")
    lowest = values.get("min_loss_scale")
    highest = values.get("max_loss_scale")
    if lowest is not None and highest is not None and lowest > highest:
        mistakes.append(f"min_loss_scale={lowest}, above max_loss_scale={highest}; pass a smaller min_loss_scale")
    if mistakes:
        raise errors.InvalidExperimentException(
            f"configure_apex_amp(opt_level={opt_level!r}, ...) got " + "; and ".join(mistakes) + "."
        )
    return Level(opt_level, **{**_LEVELS[opt_level], **values})


def _clashes_with_autocast(given: dict[str, Any]) -> list[str]:
    clashes = [
        f"{name}={given[name]!r}, but 'O1' leaves weights in float32 and casts while it computes; use 'O2' for that"
        for name in ("keep_batchnorm_fp32", "master_weights")
        if name in given
    ]
    # In apex, False means "no cast" here.
    cast = given.get("cast_model_type", torch.float32)
    if cast is not torch.float32 and cast is not False:
        clashes.append(f"cast_model_type={cast!r}, but 'O1' leaves weights in float32; use 'O2' or 'O3' to cast them")
    return clashes


def _parse_property(name: str, value: Any) -> Any:
    """Return the value of a property; raise a TypeError or ValueError for a wrong value."""
    if name == "cast_model_type" and value is False:
        return None
    if isinstance(value, str) and name == "loss_scale" and value == DYNAMIC:
        return DYNAMIC
    if isinstance(value, str) and name == "keep_batchnorm_fp32" and value in ("True", "False"):
        return value == "True"
    if name.endswith("loss_scale"):
        value = math.nan if isinstance(value, bool) else float(value)
        is_right = 0 < value < math.inf
    elif name == "num_losses":
        is_right = type(value) is int and value >= 1
    elif name.startswith("cast_model"):
        is_right = isinstance(value, torch.dtype) and value.is_floating_point
    else:
        is_right = isinstance(value, bool)
    if not is_right:
        raise ValueError(value)
    return value


def list_parts(name: str, given: Any, kind: type[_T]) -> list[_T]:
    """Return the argument ``name``, one object or a list or tuple, as a list."""
    found = list(given) if isinstance(given, list | tuple) else [given]
    if wrong := [describe(item) for item in found if not isinstance(item, kind)]:
        raise errors.InvalidExperimentException(
            f"configure_apex_amp({name}=...) takes the {kind.__name__} that wrap_{name[:-1]}() returned, or a list; "
            f"got {', '.join(wrong)}."
        )
    return found


def check_parts(
    models: list[torch.nn.Module],
    optimizers: list[torch.optim.Optimizer],
    wrapped_models: list[torch.nn.Module],
    wrapped_optimizers: list[torch.optim.Optimizer],
) -> None:
    """Raise if models and optimizers cannot be configured; the message names all reasons.

    Reasons: a part is not wrapped, an optimizer has no parameters of the models, a model is in half precision already.
    """
    mistakes = [
        f"model {index} ({type(model).__name__}) was not wrapped: pass the model that wrap_model() returned"
        for index, model in enumerate(models)
        if model not in wrapped_models
    ]
    own = {parameter for model in models for parameter in model.parameters()}
    for index, optimizer in enumerate(optimizers):
        name = f"optimizer {index} ({type(optimizer).__name__})"
        if optimizer not in wrapped_optimizers:
            mistakes.append(f"{name} was not wrapped: pass the optimizer that wrap_optimizer() returned")
        elif own.isdisjoint(parameter for group in optimizer.param_groups for parameter in group["params"]):
            mistakes.append(
                f"{name} has no parameters of the given models ({len(own)} in all): pass all models of the optimizer, "
                "and build the optimizer from the parameters of wrapped models"
            )
    mistakes += [
        f"parameter {name!r} of model {index} ({type(model).__name__}) is of type {parameter.dtype} already: pass "
        "models in float32, and leave .half() to configure_apex_amp()"
        for index, model in enumerate(models)
        for name, parameter in [(n, p) for n, p in model.named_parameters() if p.dtype in HALF_TYPES][:1]
    ]
    if mistakes:
        raise errors.InvalidExperimentException("configure_apex_amp(): " + "; ".join(mistakes) + ".")


def put_back(given: Any, changed: dict[torch.nn.Module, torch.nn.Module]) -> Any:
    """Return ``given``, a model or a container of models, with each model replaced by ``changed``."""
    if isinstance(given, torch.nn.Module):
        return changed[given]
    return type(given)(changed[model] for model in given)
