"""The state of a trial for a checkpoint's files: collecting it, and loading it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.content import TrialState
from det_lightning.checkpoint.format.resume_state import ResumeState
from det_lightning.distributed.backend import DDP_PREFIX
from det_lightning.escaping import get_logger
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
    scaling = context.precision.scaling
    if scaling.scaler is not None:
        state["scaler_state_dict"] = scaling.scaler.state_dict()
    return {**state, **scaling.state_dict()}


def collect_resume_state(
    context: PyTorchTrialContext,
    trial_state: TrialState,
    rng: dict[str, Any],
    journal: list[dict[str, Any]],
    positions: dict[str, Any],
    settings: dict[str, Any],
    has_validated: bool,
) -> ResumeState:
    """Return the content of ``resume.pth``. All ranks call this, each with its random state, journal and positions.

    Only the chief's result has the values that differ from rank to rank.
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
    mismatches = []
    if with_weights:
        mismatches += _load_models(context, state)
        load_optimizer = context.backend.states.load_optimizer
        mismatches += _load_each("optimizer", context.optimizers, state, "optimizers_state_dict", load_optimizer)
    schedulers, load_scheduler = context.lr_schedulers, LRScheduler.load_state_dict
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
    """Undo torch's conversion of a loaded state to the types of the parameters, which may round."""
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
    scaler = context.precision.scaling.scaler
    if scaler is not None and "scaler_state_dict" in state:
        with _explain_misfits("The state of the gradient scaler"):
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
    """Raise errors of loading a state as an InvalidCheckpointException that names the state."""
    try:
        yield
    except errors.CheckpointError:
        raise
    except _MISFITS as e:
        raise errors.InvalidCheckpointException(
            f"{what} cannot be loaded, because the state is damaged or of another trial: {type(e).__name__}: {e!s:.500}"
        ) from e
