"""The tolerance of a comparison: none, or as much as different versions, kernels and rounding explain."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from det_lightning.testing.records.record import TrainingRecord

# Numbers may depend on these through no fault of the trial.
_ENVIRONMENT = ("torch", "device", "processor", "threads")
# Gradients below this share of a larger one in the same batch are nothing but float32 rounding.
_NOISE = 1e-5


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far two numbers may be apart: ``|a - b| <= relative * max(|a|, |b|) + absolute``.

    If both are 0, everything must be equal to the bit. Otherwise, between environments with different kernels:

    - Metrics and data are held to this tolerance, arrays by their norm, mean, extremes and eight elements, relative to
      the largest element; learning rates, which no kernel computes, to a millionth.
    - Weights, in which errors add up, are allowed ten times as much, relative to the largest of all parameters: their
      norm, and more than half of the sampled elements. An element with a gradient near zero, whose mere sign decides
      Adam's step, may go the other way.
    - Parameters whose gradient is rounding noise (below 1e-5 of the largest one of its batch) are not compared, and
      then neither are buffers: the running mean of a batch norm follows the bias before it.
    - Random states and gradients are not compared.
    """

    relative: float = 0.0
    absolute: float = 0.0
    reason: str = ""  # why this much, for reports

    @property
    def exact(self) -> bool:
        """Whether every bit counts."""
        return self.relative == 0 == self.absolute

    def of(self, kind: str) -> Tolerance:
        if kind == "learning rate":
            return dataclasses.replace(self, relative=min(self.relative, 1e-6), absolute=0.0)
        if kind in ("parameter", "buffer", "callback state"):
            return dataclasses.replace(self, relative=10 * self.relative, absolute=10 * self.absolute)
        return self

    def allows(self, one: float, other: float, scale: float = 0.0) -> bool:
        """Return whether two numbers, from values as large as ``scale``, count as equal; two NaNs do."""
        if one == other or (one != one and other != other):
            return True
        return abs(one - other) <= self.relative * max(abs(one), abs(other), scale) + self.absolute

    def __str__(self) -> str:
        allowed = "equal to the bit" if self.exact else f"{self.relative:.2g} relative and {self.absolute:.2g} absolute"
        return f"{allowed} ({self.reason})" if self.reason else allowed


BIT_EQUAL = Tolerance(reason="same torch, device, processor and number of threads")


def tolerance_for(reference: TrainingRecord, ours: TrainingRecord) -> Tolerance:
    """Return the tolerance between the environments of two records: none if they are the same, else 0.1 %."""
    other = [name for name in _ENVIRONMENT if reference.environment.get(name) != ours.environment.get(name)]
    if not other:
        return BIT_EQUAL
    reasons = (f"{name} {reference.environment.get(name)} and {ours.environment.get(name)}" for name in other)
    return Tolerance(relative=1e-3, absolute=1e-5, reason="; ".join(reasons))


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
