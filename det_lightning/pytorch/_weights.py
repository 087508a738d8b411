"""The state of a trial for a checkpoint's files: collecting it, checking that a saved state fits, and loading it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch

from det_lightning import errors
from det_lightning.checkpoint.format.content import TrialState
from det_lightning.checkpoint.format.resume_state import ResumeState
from det_lightning.distributed.backend import DDP_PREFIX
from det_lightning.escaping import get_logger
from det_lightning.masking import short_text
from det_lightning.pytorch._callback import PyTorchCallback
from det_lightning.pytorch._lr_scheduler import LRScheduler
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._random_state import restore_rng

logger = get_logger(__name__)

# Errors of loading a state that does not fit.
_MISFITS = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)


def collect_weights(context: PyTorchTrialContext) -> dict[str, Any]:
    """Return the states of models and optimizers, under Determined's keys; see :class:`ModelStates`."""
    states = context.backend.states
    return {
        "models_state_dict": [*map(states.model_state, context.models)],
        "optimizers_state_dict": [*map(states.optimizer_state, context.optimizers)],
    }


def collect_rest(
    context: PyTorchTrialContext, callbacks: dict[str, PyTorchCallback], rng_state: dict[str, Any]
) -> dict[str, Any]:
    """Return the states of schedulers, callbacks, scalers and random generators, under Determined's keys."""
    state: dict[str, Any] = {
        "lr_schedulers_state_dict": [scheduler.state_dict() for scheduler in context.lr_schedulers],
        "callbacks": {name: callback.state_dict() for name, callback in callbacks.items()},
        "rng_state": rng_state,
    }
    precision = context.precision
    if precision.scaler is not None:
        state["scaler_state_dict"] = precision.scaler.state_dict()
    return {**state, **precision.scaling.state_dict()}


def collect_resume_state(
    context: PyTorchTrialContext,
    trial_state: TrialState,
    rng: dict[str, Any],
    journal: list[dict[str, Any]],
    positions: dict[str, Any],
    settings: dict[str, Any],
    has_validated: bool,
) -> ResumeState:
    """Return the content of ``resume.pth``. All ranks call together, each with its random state, journal and positions.

    On ranks other than the chief, the result lacks the values that differ from rank to rank.
    """
    distributed = context.distributed
    states = context.backend.states
    gradients: Any = [*map(states.gradients, context.models)]
    # The chief already has the average of sharded gradients.
    of_ranks = distributed.gather((rng, journal, positions, None if states.is_sharded else gradients))
    columns = zip(*of_ranks, strict=True) if of_ranks else [(), (), (), ()]
    rng_states, journals, all_positions, of_each = map(list, columns)
    if distributed.size > 1:
        gradients = [gradients] if states.is_sharded else of_each
    required_grad = enumerate(context.wrapped.required_grad)
    return ResumeState(
        trial_state=dict(vars(trial_state)),
        rng_states=rng_states,
        journals=journals,
        optimizer_steps=context.optimizer_steps,
        gradients=gradients,
        precision=context.precision.scaling.collect_partial(),
        world_size=distributed.size,
        settings=settings,
        has_validated=has_validated,
        positions=all_positions,
        requires_grad={place: p.requires_grad for place, (p, was) in required_grad if p.requires_grad != was},
    )


def load_resume_state(context: PyTorchTrialContext, resume: ResumeState, source: str) -> None:
    """Load what :func:`collect_resume_state` returned, except the position in the data."""
    context.optimizer_steps = resume.optimizer_steps
    rank = context.distributed.rank
    states = context.backend.states
    of_ranks = [resume.gradients] if resume.world_size == 1 else resume.gradients
    is_own = len(of_ranks) == context.distributed.size and not states.is_sharded
    with _explain_misfits(f"The gradients in {source}"):
        gradients = of_ranks[rank] if is_own else _average_gradients(of_ranks)
        for model, saved in zip(context.models, gradients[: len(context.models)], strict=True):
            states.load_gradients(model, saved)
        context.precision.scaling.load_partial(resume.precision)
    restore_rng(resume.rng_states[rank % len(resume.rng_states)], context.device)


def _average_gradients(ranks: list[list[dict[str, torch.Tensor]]]) -> list[dict[str, torch.Tensor]]:
    """Return the gradients averaged over several ranks, by parameter for each model; a missing gradient is zero."""
    if len(ranks) == 1:
        return ranks[0]
    averages = []
    for of_model in zip(*ranks, strict=True):
        names = dict.fromkeys(name for gradients in of_model for name in gradients)
        present = {name: [gradients[name] for gradients in of_model if name in gradients] for name in names}
        averages.append({name: sum(present[name][1:], present[name][0]) / len(ranks) for name in names})
    return averages


def load_state(
    context: PyTorchTrialContext,
    callbacks: dict[str, PyTorchCallback],
    state: dict[str, Any],
    source: str,
    trial_class: str | None = None,
    *,
    with_weights: bool = True,
) -> None:
    """Load everything but the random state into the trial; an error names everything that does not fit.

    Unless ``with_weights``, models and optimizers keep their states.
    """

    def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        require_fitting_optimizer(optimizer, saved)
        context.backend.states.load_optimizer(optimizer, saved)

    def load_scheduler(scheduler: LRScheduler, saved: dict[str, Any]) -> None:
        require_fitting_scheduler(scheduler.scheduler, saved)
        scheduler.load_state_dict(saved)

    mismatches = []
    if with_weights:
        mismatches += _load_models(context, state)
        mismatches += _load_each("optimizer", context.optimizers, state, "optimizers_state_dict", load_optimizer)
    schedulers = context.lr_schedulers
    mismatches += _load_each("learning rate scheduler", schedulers, state, "lr_schedulers_state_dict", load_scheduler)
    _raise_if_any(mismatches, source, trial_class)
    if with_weights and not context.backend.states.is_sharded and _have_same_types(context, state):
        for optimizer, saved in zip(context.optimizers, state["optimizers_state_dict"], strict=False):
            if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
                _keep_types(optimizer, saved)
    _load_rest(context, callbacks, state)


def _have_same_types(context: PyTorchTrialContext, state: dict[str, Any]) -> bool:
    def types_of(weights: dict[str, Any]) -> list[Any]:
        return [getattr(value, "dtype", None) for value in weights.values()]

    pairs = zip(context.models, state["models_state_dict"], strict=False)
    return all(types_of(model.state_dict()) == types_of(saved) for model, saved in pairs)


def _keep_types(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Undo the conversion of a loaded state to the types of the parameters, which torch makes and which may round."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    for parameter, key in zip(parameters, keys, strict=True):
        loaded = optimizer.state.get(parameter, {})
        for name, value in saved["state"].get(key, {}).items():
            found = loaded.get(name) if name != "step" and isinstance(value, torch.Tensor) else None
            if found is not None and found.dtype != value.dtype and torch.equal(value.to(found), found):
                loaded[name] = value.to(found.device)


def _load_rest(context: PyTorchTrialContext, callbacks: dict[str, PyTorchCallback], state: dict[str, Any]) -> None:
    """Load gradient and loss scalers and the callbacks; warn if a scaler or a callback's state is missing."""
    scaler = context.precision.scaler
    if scaler is not None and "scaler_state_dict" in state:
        with _explain_misfits("The state of the gradient scaler"):
            require_fitting_scale(state["scaler_state_dict"])
            scaler.load_state_dict(state["scaler_state_dict"])
    elif (scaler is not None) != ("scaler_state_dict" in state):
        has, lacks = ("checkpoint", "trial") if scaler is None else ("trial", "checkpoint")
        logger.warning(
            "The %s has a gradient scaler but the %s has none; the state of the scaler is not restored.", has, lacks
        )
    with _explain_misfits("The state of the precision"):
        context.precision.scaling.load_state_dict(state)
    saved = state.get("callbacks", {})
    for name, callback in callbacks.items():
        if name in saved:
            callback.load_state_dict(saved[name])
        elif type(callback).load_state_dict is not PyTorchCallback.load_state_dict:
            logger.warning("The checkpoint has no state for callback %r; it starts over.", name)


def load_models(
    context: PyTorchTrialContext,
    state: dict[str, Any],
    source: str,
    trial_class: str | None = None,
    *,
    strict: bool = True,
) -> None:
    """Load the weights of all models, adding or removing DDP's name prefix as needed.

    Unless ``strict``, weights may be missing or left over; only models on one device allow that.
    """
    _raise_if_any(_load_models(context, state, strict), source, trial_class)


def _load_models(context: PyTorchTrialContext, state: dict[str, Any], strict: bool = True) -> list[str]:
    def load(model: torch.nn.Module, weights: dict[str, Any]) -> None:
        fitting = _fit_prefix(model, weights)
        if strict:
            context.backend.states.load_model(model, fitting)
        else:
            model.load_state_dict(fitting, strict=False)

    return _load_each("model", context.models, state, "models_state_dict", load)


def _fit_prefix(model: torch.nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    expected = model.state_dict().keys()
    stripped = {name.removeprefix(DDP_PREFIX): value for name, value in weights.items()}
    prefixed = {DDP_PREFIX + name: value for name, value in weights.items()}
    return max((weights, stripped, prefixed), key=lambda candidate: len(candidate.keys() & expected))


def _load_each(
    what: str, targets: list[Any], state: dict[str, Any], key: str, load: Callable[[Any, Any], None]
) -> list[str]:
    """Load the list ``state[key]`` into ``targets``; return one sentence for each misfit.

    As in Determined, the list may be longer than ``targets``.
    """
    states = state.get(key)
    if not isinstance(states, list):
        return [f"there is no list {key!r}; there is {', '.join(sorted(map(str, state))) or 'nothing'}"]
    if not all(isinstance(one, dict) for one in states):
        return [f"{key!r} must be a list of dicts; got {', '.join(type(one).__name__ for one in states):.200}"]
    if len(targets) > len(states):
        return [f"the trial wraps {len(targets)} {what}(s), and {len(states)} are there"]
    if len(targets) < len(states):
        logger.warning(
            "The checkpoint has %d %s(s), and the trial wraps %d: only the first %d are loaded.",
            *(len(states), what, len(targets), len(targets)),
        )
    mismatches = []
    for index, (target, saved) in enumerate(zip(targets, states, strict=False)):
        try:
            load(target, saved)
        except _MISFITS as e:
            mismatches.append(f"{what} {index} ({type(target).__name__}): {' '.join(str(e).split()).rstrip('.')}")
    return mismatches


def _raise_if_any(mismatches: list[str], source: str, trial_class: str | None) -> None:
    if mismatches:
        written_by = f" It was written by the trial {trial_class}." if trial_class else ""
        raise errors.InvalidCheckpointException(
            f"{source} does not fit the trial: {'; '.join(mismatches)}. It is a checkpoint of another trial or of "
            f"weights alone, or the trial was changed.{written_by}"
        )


@contextlib.contextmanager
def _explain_misfits(what: str) -> Iterator[None]:
    """Turn errors of loading a state into an InvalidCheckpointException that names the state."""
    try:
        yield
    except errors.CheckpointError:
        raise
    except _MISFITS as e:
        raise errors.InvalidCheckpointException(
            f"{what} cannot be loaded, because the state is damaged or of another trial: {type(e).__name__}: {e!s:.500}"
        ) from e


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
