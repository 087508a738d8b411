"""Gradients that are nothing but rounding noise."""

from __future__ import annotations

from collections.abc import Mapping

from det_lightning.testing.records.record import TrainingRecord

# Gradients below this share of a larger one in the same batch are nothing but float32 rounding.
_NOISE = 1e-5


def with_noise_for_gradient(theirs: Mapping[str, float], mine: Mapping[str, float]) -> set[str]:
    """Return the parameters whose gradient is zero except for rounding, such as a bias before a batch norm.

    Optimizers that divide by the size of a gradient turn it into full steps in a random direction.
    """
    noise = [_NOISE * max(gradients.values(), default=0.0) for gradients in (theirs, mine)]
    sizes = {name: (theirs[name], mine[name]) for name in theirs.keys() & mine.keys()}
    return {name for name, pair in sizes.items() if any(pair) and (pair[0] < noise[0] or pair[1] < noise[1])}


def whose_gradient_cancels(record: TrainingRecord) -> set[str]:
    """Return the parameters whose gradient is zero in exact arithmetic, in every batch of a training.

    A gradient reaches their module, but its parts cancel out: another parameter of the module, or of the model if the
    module has no other one, gets a gradient compared to which theirs is rounding noise.
    """
    batches = [event["gradients"] for event in record.named("batch_end") if event["gradients"]]
    names = dict.fromkeys(name for gradients in batches for name in gradients)
    return {name for name in names if all(_cancels(name, gradients) for gradients in batches if name in gradients)}


def _cancels(name: str, gradients: Mapping[str, float]) -> bool:
    module = name.rpartition(".")[0]
    model = name.partition(".")[0]
    others = {other: size for other, size in gradients.items() if other != name}
    beside = [size for other, size in others.items() if other.rpartition(".")[0] == module]
    if not beside:
        # If it is exactly zero, with no other gradient in the module, the loss may also ignore the module.
        beside = [size for other, size in others.items() if other.partition(".")[0] == model and gradients[name]]
    largest = max(beside, default=0.0)
    return largest > 0 and gradients[name] <= _NOISE * largest
