"""What a trial must have to be trained: wrapped parts, one evaluation method, methods that can be called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from det_lightning import errors
from det_lightning.engine.events import overrides
from det_lightning.engine.validation import takes_batch_idx
from det_lightning.pytorch._legacy_trial import interface_mistakes, original_trial
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial, SelfSavingTrial


def require_trainable(trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
    """Raise an InvalidExperimentException that names everything that keeps the trial from being trained."""
    mistakes = [*_of_interface(trial), *_of_wrapping(trial, context), *_of_evaluation(trial)]
    if mistakes:
        raise errors.InvalidExperimentException("; ".join(mistakes) + ".")


def _of_interface(trial: PyTorchTrial) -> list[str]:
    return interface_mistakes(trial) or _mistakes_of_call(trial, "train_batch", ["batch", "epoch_idx", "batch_idx"])


def _of_wrapping(trial: PyTorchTrial, context: PyTorchTrialContext) -> Iterator[str]:
    if isinstance(trial, SelfSavingTrial):
        return
    name = type(original_trial(trial)).__name__
    if not context.models:
        yield f"{name} has no wrapped model; pass each model through context.wrap_model() in __init__"
    if not context.optimizers:
        yield f"{name} has no wrapped optimizer; pass each optimizer through context.wrap_optimizer() in __init__"


def _of_evaluation(trial: PyTorchTrial) -> list[str]:
    original = original_trial(trial)
    arguments = {"evaluate_batch": ["batch"], "evaluate_full_dataset": ["data_loader"]}
    overridden = [name for name in arguments if overrides(original, PyTorchTrial, name)]
    if len(overridden) != 1:
        return [
            f"{type(original).__name__} must override exactly one of evaluate_batch() and evaluate_full_dataset(); it "
            f"overrides {' and '.join(overridden) or 'neither'}"
        ]
    (method,) = overridden
    if method == "evaluate_batch" and trial is original and takes_batch_idx(original.evaluate_batch):
        arguments[method].append("batch_idx")
    return _mistakes_of_call(trial, method, arguments[method])


def _mistakes_of_call(trial: PyTorchTrial, method: str, arguments: Sequence[str]) -> list[str]:
    """Return why a user's method cannot be called with these keywords; in a legacy trial it gets the model too."""
    original = original_trial(trial)
    names = [*arguments] if trial is original else [*arguments, "model"]
    try:
        # A wrapper may pass on different arguments than it takes.
        signature = inspect.signature(getattr(original, method), follow_wrapped=False)
    except ValueError:  # compiled code may have no signature
        return []
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as e:
        return [
            f"{type(original).__name__}.{method}{signature} cannot be called: {e}; its arguments are passed by name, "
            f"as {', '.join(names)}"
        ]
    return []
