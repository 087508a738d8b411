"""The first difference of two records of the same trial, and by how much."""

from __future__ import annotations

import dataclasses
from typing import Any

from det_lightning.testing.reference import TrainingRecord

__all__ = ["BIT_EQUAL", "Difference", "Tolerance", "first_difference", "tolerance_for"]


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far two numbers may lie apart: ``|a - b| <= relative * max(|a|, |b|) + absolute``.

    Where both are 0, numbers have to be equal to the bit, random states and the bits of weights included. Otherwise
    weights and data are compared by their norm, mean, extremes and eight of their elements, ``relative`` meaning
    relative to the largest element; and random states are left out, since other kernels may draw otherwise.

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


BIT_EQUAL = Tolerance(reason="the same torch on the same processor")


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing in which two records differ.

    ``str()`` of it is a sentence with all of that; :attr:`likely_cause` says where to look.

    Attributes:
        kind: ``"metric"``, ``"validation metric"``, ``"learning rate"``, ``"parameter"``, ``"buffer"``, ``"data"``,
            ``"random state"``, ``"callback"``, ``"number of batches"``, ``"error"``, or ``"settings"``.
        name: of the metric, parameter, callback, ...
        batch: index of the batch (from 0), or None where it is about none.
        reference: the value in the reference; None where it has none.
        ours: the value in the other record; None where it has none.
        absolute: ``|reference - ours|``, for numbers.
        relative: that over ``max(|reference|, |ours|)``, for numbers.
        ulps: number of representable numbers of the dtype from one to the other, for floating-point numbers.
        tolerance: what would have been allowed.
        also: what else differs at the same batch, in order, as ``"kind name"``; it tells causes apart.
    """

    kind: str
    name: str
    batch: int | None
    reference: Any
    ours: Any
    absolute: float | None = None
    relative: float | None = None
    ulps: int | None = None
    tolerance: Tolerance = BIT_EQUAL
    also: tuple[str, ...] = ()

    @property
    def likely_cause(self) -> str:
        """What usually makes this kind of thing differ first."""
        raise NotImplementedError


def tolerance_for(reference: TrainingRecord, ours: TrainingRecord) -> Tolerance:
    """Return what may differ between records of these two environments.

    Nothing where torch's version, the device, the processor and the number of threads are the same. Otherwise other
    kernels sum in another order: 0.1 % relative, and 1e-5 absolute.
    """
    raise NotImplementedError


def first_difference(
    reference: TrainingRecord, ours: TrainingRecord, tolerance: Tolerance | None = None
) -> Difference | None:
    """Return the earliest difference of two records, or None where there is none.

    Args:
        reference: what should have happened.
        ours: what did.
        tolerance: by default that of :func:`tolerance_for`.
    """
    raise NotImplementedError
