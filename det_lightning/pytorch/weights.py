"""Between the state of a trial and the content of a checkpoint's ``state_dict.pth``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from det_lightning import errors
from det_lightning.pytorch.callback import PyTorchCallback
from det_lightning.pytorch.context import PyTorchTrialContext

__all__ = [
    "collect_gradients",
    "collect_state",
    "load_gradients",
    "load_models",
    "load_rest",
    "load_schedulers",
    "load_state",
]

logger = logging.getLogger("det_lightning.pytorch")

_DDP_PREFIX = "module."


def collect_state(
    context: PyTorchTrialContext, callbacks: dict[str, PyTorchCallback], rng_state: dict[str, Any]
) -> dict[str, Any]:
    """Return the state of everything that the trial wrapped, under the keys that Determined uses."""
    state: dict[str, Any] = {
        "models_state_dict": [model.state_dict() for model in context.models],
        "optimizers_state_dict": [optimizer.state_dict() for optimizer in context.optimizers],
        "lr_schedulers_state_dict": [scheduler.state_dict() for scheduler in context.lr_schedulers],
        "callbacks": {name: callback.state_dict() for name, callback in callbacks.items()},
        "rng_state": rng_state,
    }
    if context.scaler is not None:
        state["scaler_state_dict"] = context.scaler.state_dict()
    return state


def collect_gradients(context: PyTorchTrialContext) -> list[dict[str, torch.Tensor]]:
    """Return the gradients that each model holds, by parameter; those of an aggregation that is under way."""
    return [
        {name.removeprefix(_DDP_PREFIX): p.grad for name, p in model.named_parameters() if p.grad is not None}
        for model in context.models
    ]


def load_gradients(context: PyTorchTrialContext, gradients: list[dict[str, torch.Tensor]]) -> None:
    """Put back what :func:`collect_gradients` returned."""
    for model, saved in zip(context.models, gradients, strict=True):
        for name, parameter in model.named_parameters():
            grad = saved.get(name.removeprefix(_DDP_PREFIX))
            parameter.grad = None if grad is None else grad.to(parameter.device)


def load_state(
    context: PyTorchTrialContext,
    callbacks: dict[str, PyTorchCallback],
    state: dict[str, Any],
    source: str,
    trial_class: str | None = None,
) -> None:
    """Load everything but the random state into the trial.

    Args:
        context: the trial's.
        callbacks: the trial's.
        state: what :func:`collect_state` returned.
        source: where it was read, for messages.
        trial_class: the class that wrote it, for messages.

    Raises:
        InvalidCheckpointException: something does not fit; names everything that does not.
    """
    _raise_if_any(
        [
            *_load_each("model", context.models, state, "models_state_dict", _fit_prefix),
            *_load_each("optimizer", context.optimizers, state, "optimizers_state_dict"),
            *_load_each("learning rate scheduler", context.lr_schedulers, state, "lr_schedulers_state_dict"),
        ],
        source,
        trial_class,
    )
    load_rest(context, callbacks, state)


def load_schedulers(context: PyTorchTrialContext, state: dict[str, Any], source: str) -> None:
    """Load the learning rate schedulers.

    Raises:
        InvalidCheckpointException: their number differs, or one does not take its state.
    """
    mismatches = _load_each("learning rate scheduler", context.lr_schedulers, state, "lr_schedulers_state_dict")
    _raise_if_any(mismatches, source)


def load_rest(context: PyTorchTrialContext, callbacks: dict[str, PyTorchCallback], state: dict[str, Any]) -> None:
    """Load the gradient scaler and the callbacks; what is missing on one side is warned of."""
    if context.scaler is not None and "scaler_state_dict" in state:
        context.scaler.load_state_dict(state["scaler_state_dict"])
    elif (context.scaler is not None) != ("scaler_state_dict" in state):
        has, lacks = ("checkpoint", "trial") if context.scaler is None else ("trial", "checkpoint")
        logger.warning("The %s has a gradient scaler but the %s has none; its state is not restored.", has, lacks)
    saved = state.get("callbacks", {})
    for name, callback in callbacks.items():
        if name in saved:
            callback.load_state_dict(saved[name])
        elif type(callback).load_state_dict is not PyTorchCallback.load_state_dict:
            logger.warning("The checkpoint has no state for callback %r; it begins anew.", name)


def load_models(
    models: list[torch.nn.Module], state: dict[str, Any], source: str, trial_class: str | None = None
) -> None:
    """Load the weights of all models. The prefix that DDP gives to names is added or taken away as needed.

    Raises:
        InvalidCheckpointException: number, names or shapes differ; names what.
    """
    _raise_if_any(_load_each("model", models, state, "models_state_dict", _fit_prefix), source, trial_class)


def _fit_prefix(model: torch.nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    expected = model.state_dict().keys()
    stripped = {name.removeprefix(_DDP_PREFIX): value for name, value in weights.items()}
    prefixed = {_DDP_PREFIX + name: value for name, value in weights.items()}
    return next((w for w in (weights, stripped, prefixed) if w.keys() == expected), weights)


def _as_saved(_target: Any, saved: Any) -> Any:
    return saved


def _load_each(
    what: str,
    targets: list[Any],
    state: dict[str, Any],
    key: str,
    fit: Callable[[Any, Any], Any] = _as_saved,
) -> list[str]:
    """Load what stands under ``key`` into ``targets``; return what does not fit, a sentence each."""
    states = state.get(key)
    if not isinstance(states, list):
        return [f"there is no list {key!r}; there is {', '.join(sorted(map(str, state))) or 'nothing'}"]
    if len(targets) != len(states):
        return [f"the trial wraps {len(targets)} {what}(s), and {len(states)} are there"]
    mismatches = []
    for index, (target, saved) in enumerate(zip(targets, states, strict=True)):
        try:
            target.load_state_dict(fit(target, saved))
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
            mismatches.append(f"{what} {index} ({type(target).__name__}): {e}")
    return mismatches


def _raise_if_any(mismatches: list[str], source: str, trial_class: str | None = None) -> None:
    if mismatches:
        written_by = f" It was written by the trial {trial_class}." if trial_class else ""
        raise errors.InvalidCheckpointException(
            f"{source} does not fit the trial:\n- "
            + "\n- ".join(mismatches)
            + f"\nIt is a checkpoint of another trial, "
            f"or the trial was changed.{written_by}"
        )
