"""What two trainings may differ in, and how one difference is described."""

from __future__ import annotations

import dataclasses
from typing import Any

from det_lightning.testing.causes import usual_causes
from det_lightning.testing.records.values import shown


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far two numbers may lie apart: ``|a - b| <= relative * max(|a|, |b|) + absolute``.

    Where both are 0, numbers have to be equal to the bit, random states and the bits of weights included. Otherwise,
    between environments whose kernels sum in another order, or draw otherwise:

    - Metrics and data are held to this tolerance, arrays by their norm, mean, extremes and eight of their elements,
      relative to the largest element. Learning rates, which no kernel computes, are held to a millionth.
    - Weights are held to ten times as much, relative to the largest of all parameters, since they add up what came
      before: their norm, and more than half of the sampled elements. The others may have a gradient near zero, whose
      sign alone decides on a step of Adam.
    - Parameters whose gradient is rounding noise (less than 1e-5 of the largest one of its batch) are left out, and
      then buffers too: the running mean of a batch norm follows the bias before it.
    - Random states and gradients are not compared.

    Attributes:
        relative: share of the larger of the two numbers.
        absolute: in the unit of the numbers; keeps numbers near zero from counting.
        reason: why this much, for reports.
    """

    relative: float = 0.0
    absolute: float = 0.0
    reason: str = ""

    @property
    def exact(self) -> bool:
        """Whether every bit counts."""
        return self.relative == 0 == self.absolute

    def of(self, kind: str) -> Tolerance:
        """Return what is allowed for one kind of :class:`Difference`."""
        if kind == "learning rate":
            return dataclasses.replace(self, relative=min(self.relative, 1e-6), absolute=0.0)
        if kind in ("parameter", "buffer", "callback state"):
            return dataclasses.replace(self, relative=10 * self.relative, absolute=10 * self.absolute)
        return self

    def allows(self, one: float, other: float, scale: float = 0.0) -> bool:
        """Tell whether the two numbers, of things whose size is ``scale``, count as the same."""
        if one == other or (one != one and other != other):
            return True
        return abs(one - other) <= self.relative * max(abs(one), abs(other), scale) + self.absolute

    def __str__(self) -> str:
        allowed = "equal to the bit" if self.exact else f"{self.relative:.2g} relative and {self.absolute:.2g} absolute"
        return f"{allowed} ({self.reason})" if self.reason else allowed


BIT_EQUAL = Tolerance(reason="same torch, device, processor and number of threads")


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing in which two trainings differ.

    ``str()`` of it is a sentence with all of that; :attr:`likely_cause` says where to look.

    Attributes:
        kind: ``"metric"``, ``"validation metric"``, ``"learning rate"``, ``"gradient"`` (its norm), ``"parameter"``,
            ``"buffer"``, ``"data"``, ``"random state"``, ``"epoch"``, ``"callback"``, ``"callback state"``,
            ``"optimizer state"``, ``"scheduler state"``, ``"number of batches"``, ``"error"``, or ``"settings"``.
        name: of the metric, parameter, callback, ...
        batch: index of the batch (from 0), or None where it is about none. Before the first batch it is 0; after the
            last one it is the number of batches.
        reference: the value in the first training; None where it has none.
        ours: the value in the second one; None where it has none.
        part: what of it the two values are, such as ``"element 3 of 15"`` or ``"validation batch 0"``.
        absolute: ``|reference - ours|``, for numbers.
        relative: that over ``max(|reference|, |ours|)``, for numbers.
        ulps: number of representable numbers of the dtype from one to the other, for floating-point numbers.
        tolerance: what would have been allowed.
        also: what else differs at the same batch, in order, the first of each kind, such as ``"random state torch"``
            or ``"parameter fc.weight and 3 more"``; it tells causes apart.
        unsteady: parameters that were left out, because their gradient is nothing but rounding noise.
        drawn_apart: the batch from which on the random states differed, where they were not compared.
        sides: what the two trainings are called in sentences.
    """

    kind: str
    name: str
    batch: int | None
    reference: Any
    ours: Any
    part: str = ""
    absolute: float | None = None
    relative: float | None = None
    ulps: int | None = None
    tolerance: Tolerance = BIT_EQUAL
    also: tuple[str, ...] = ()
    unsteady: tuple[str, ...] = ()
    drawn_apart: int | None = None
    sides: tuple[str, str] = ("in the reference", "here")

    @property
    def likely_cause(self) -> str:
        """What usually makes this kind of thing differ first from the real determined."""
        usual = " ".join(usual_causes("reference", self.kind))
        drew = any(label.startswith("random state") for label in (f"{self.kind} {self.name}", *self.also))
        if drew and self.kind not in ("settings", "error", "number of batches"):
            return (
                "The random generators are not in the same state: one side draws a number more or less, or seeds again."
            )
        if self.drawn_apart is not None:
            return (
                f"The random generators are in other states since batch {self.drawn_apart}: the versions of torch draw "
                "otherwise (dropout, for one), or one side draws more. Compare with dropout at 0, or the same version."
            )
        if self.unsteady:
            return (
                f"It may be rounding alone: the gradient of {', '.join(self.unsteady)} is noise (a bias before a batch "
                "norm?), and optimizers like Adam make steps of full length out of it. Allow more, or compare with the "
                "same version of torch."
            )
        if not self.tolerance.exact and self.kind in ("metric", "validation metric", "parameter"):
            return f"{usual} Or torch drops other elements than it did: compare with dropout at 0 too."
        return usual

    def __str__(self) -> str:
        name = f"{self.kind} {self.name}" + (f" ({self.part})" if self.part else "")
        position = "" if self.batch is None else f" at batch {self.batch}"
        also = f" Also different there: {', '.join(self.also)}." if self.also else ""
        return (
            f"The first difference is the {name}{position}: {shown(self.reference)} {self.sides[0]}, "
            f"{shown(self.ours)} {self.sides[1]}{self._distance()}. Allowed: {self.tolerance}.{also}"
        )

    def _distance(self) -> str:
        if self.absolute is None:
            return ""
        relative = "" if self.relative is None else f", {self.relative:.3g} relative"
        ulps = "" if self.ulps is None else f", {self.ulps:,} ULP"
        return f" ({self.absolute:.3g} apart{relative}{ulps})"
