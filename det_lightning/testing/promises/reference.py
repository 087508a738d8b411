"""Does the trial train as it did on Determined?"""

from __future__ import annotations

from det_lightning.testing.evidence import Evidence
from det_lightning.testing.outcomes import BrokenPromise

__all__ = ["matches"]


def matches(evidence: Evidence) -> None:
    """Batch by batch, weights and callbacks included."""
    conversion = evidence.conversion
    difference = conversion.difference
    if difference is not None:
        raise BrokenPromise(
            f"det_lightning does not train as the reference. First difference: {difference}",
            causes=[difference.likely_cause],
        )
