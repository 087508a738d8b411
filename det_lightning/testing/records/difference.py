"""The description of a difference."""

from __future__ import annotations

import dataclasses
from typing import Any

from det_lightning.testing.causes import usual_causes
from det_lightning.testing.records.tolerance import BIT_EQUAL, Tolerance
from det_lightning.testing.records.values import shown


@dataclasses.dataclass(frozen=True)
class Difference:
    """One value in which two trainings differ; ``str()`` describes everything known about it."""

    kind: str  # "metric", "parameter", "data", ...: the kinds in causes.py
    name: str  # of the metric, parameter, callback, ...
    batch: int | None  # its index; the number of batches if it is after the last one; None for settings
    reference: Any  # the value in the first training; None if there is none
    ours: Any  # the value in the second one
    part: str = ""  # the part of the value, such as "element 3 of 15" or "validation batch 0"
    absolute: float | None = None  # |reference - ours|, for numbers
    relative: float | None = None  # that over max(|reference|, |ours|)
    ulps: int | None = None  # steps between representable numbers of the dtype, for floating-point numbers
    tolerance: Tolerance = BIT_EQUAL
    also: tuple[str, ...] = ()  # other differences at the same batch, such as "parameter fc.weight and 3 more"
    noisy_parameters: tuple[str, ...] = ()  # parameters that were not compared because their gradient is rounding noise
    rng_diverged_at: int | None = None  # the first batch with differing random states, if these were not compared
    sides: tuple[str, str] = ("in the reference", "here")

    @property
    def likely_cause(self) -> str:
        """The usual cause of a difference like this from the real determined."""
        usual = " ".join(usual_causes("reference", self.kind))
        drew = any(label.startswith("random state") for label in (f"{self.kind} {self.name}", *self.also))
        if drew and self.kind not in ("settings", "error", "number of batches"):
            return " ".join(usual_causes("reference", "random state"))
        if self.rng_diverged_at is not None:
            return (
                f"The random states differ from batch {self.rng_diverged_at} on: the versions of torch draw "
                "differently (as in dropout), or one side draws more numbers. Set dropout to 0, or use the same "
                "version."
            )
        if self.noisy_parameters:
            return (
                f"It may be rounding alone: the gradient of {', '.join(self.noisy_parameters)} is noise (a bias "
                "before a batch norm?), which optimizers like Adam turn into full steps. Allow more, or compare with "
                "the same version of torch."
            )
        if not self.tolerance.exact and self.kind in ("metric", "validation metric", "parameter"):
            return f"{usual} Or this version of torch drops other elements: compare with dropout at 0 too."
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
