"""What a trial must define before it can be trained."""

from __future__ import annotations

from det_lightning import errors
from det_lightning.pytorch._legacy_trial import interface_mistakes, original_trial
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial


def require_trainable(trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
    """Raise an InvalidExperimentException that names all that keeps the trial from being trained."""
    trial_class = type(original_trial(trial))
    name = trial_class.__name__
    mistakes = interface_mistakes(trial)
    if not context.models:
        mistakes.append(f"{name} has no wrapped model; pass each model through context.wrap_model() in __init__")
    if not context.optimizers:
        mistakes.append(
            f"{name} has no wrapped optimizer; pass each optimizer through context.wrap_optimizer() in __init__"
        )
    overridden = [
        method
        for method in ("evaluate_batch", "evaluate_full_dataset")
        if getattr(trial_class, method) is not getattr(PyTorchTrial, method)
    ]
    if len(overridden) != 1:
        mistakes.append(
            f"{name} must override exactly one of evaluate_batch() and evaluate_full_dataset(); it overrides "
            f"{' and '.join(overridden) or 'neither'}"
        )
    if mistakes:
        raise errors.InvalidExperimentException("; ".join(mistakes) + ".")
