"""Does an old checkpoint load, and validate as it did?"""

from __future__ import annotations

from det_lightning.testing.evidence import Evidence
from det_lightning.testing.outcomes import BrokenPromise, UncheckedPromise

__all__ = ["loads", "reproduces_metrics"]

# Other releases of torch, other devices: kernels that sum in another order.
_TOLERANCE = 1e-3


def loads(evidence: Evidence) -> None:
    """Its weights, optimizers, schedulers and callbacks fit the trial."""
    old = evidence.old_checkpoint
    failure = old.resumed.failure
    if failure is not None:
        raise BrokenPromise(
            f"The trial does not go on from {old.path}: it fails {failure.told}",
            causes=["other hyperparameters than those it was trained with", "a model that was changed since"],
        )


def reproduces_metrics(evidence: Evidence) -> None:
    """A validation with its weights gives the metrics that were written down with it."""
    old = evidence.old_checkpoint
    failure = old.validated.failure
    if failure is not None:
        raise BrokenPromise(f"{old.path} can not be validated: the trial fails {failure.told}")
    if not old.recorded:
        raise UncheckedPromise(
            f"{old.path} does not tell its validation metrics (metadata.json has none); give them with "
            "--trial-metrics. The validation here gives "
            + ", ".join(f"{name} {value:.6g}" for name, value in old.measured.items())
        )
    tolerance = evidence.options.tolerance if evidence.options.tolerance is not None else _TOLERANCE
    for name, value in old.recorded.items():
        if name not in old.measured:
            raise BrokenPromise(
                f"The checkpoint tells of validation metric {name!r}; the validation gives {', '.join(old.measured)}.",
                causes=["a metric that was renamed since"],
            )
        measured = old.measured[name]
        if not abs(measured - value) <= tolerance * max(abs(measured), abs(value)) + 1e-6:
            raise BrokenPromise(
                f"validation metric {name!r} was {value:.9g} when the checkpoint was written, and is {measured:.9g} "
                f"now, {abs(measured - value):.3g} apart (allowed: {tolerance:g} of it).",
                causes=[
                    "other validation data, or another preparation of them",
                    "a model in training mode while it validates, or state that is not in the checkpoint",
                ],
            )
