"""Does an old checkpoint load, and validate as it did?"""

from __future__ import annotations

from det_lightning.testing.outcomes import CheckFailed, NotChecked
from det_lightning.testing.training.runs import TrialRuns

# Other releases of torch, other devices: kernels that sum in another order.
_TOLERANCE = 1e-3


def loads(runs: TrialRuns) -> None:
    """Its weights, optimizers, schedulers and callbacks fit the trial."""
    old = runs.old_checkpoint
    failure = old.resumed.failure
    if failure is not None:
        raise CheckFailed(
            f"The trial does not go on from {old.path}: it fails {failure.description}",
            causes=["other hyperparameters than those it was trained with", "a model that was changed since"],
        )


def reproduces_metrics(runs: TrialRuns) -> None:
    """A validation with its weights gives the metrics that were written down with it."""
    old = runs.old_checkpoint
    failure = old.validated.failure
    if failure is not None:
        raise CheckFailed(f"{old.path} cannot be validated: the trial fails {failure.description}")
    if not old.recorded:
        raise NotChecked(
            f"{old.path} does not tell its validation metrics (metadata.json has none); give them with "
            "--trial-metrics. The validation here gives "
            + ", ".join(f"{name} {value:.6g}" for name, value in old.measured.items())
        )
    tolerance = runs.options.tolerance if runs.options.tolerance is not None else _TOLERANCE
    for name, value in old.recorded.items():
        if name not in old.measured:
            raise CheckFailed(
                f"The checkpoint tells of validation metric {name!r}; the validation gives {', '.join(old.measured)}.",
                causes=["a metric that was renamed since"],
            )
        measured = old.measured[name]
        if not abs(measured - value) <= tolerance * max(abs(measured), abs(value)) + 1e-6:
            raise CheckFailed(
                f"validation metric {name!r} was {value:.9g} when the checkpoint was written, and is {measured:.9g} "
                f"now, {abs(measured - value):.3g} apart (allowed: {tolerance:g} of it).",
                causes=[
                    "other validation data, or another preparation of them",
                    "a model in training mode while it validates, or state that is not in the checkpoint",
                ],
            )
