"""Does the trial train as it did on Determined?"""

from __future__ import annotations

from det_lightning.testing.outcomes import CheckFailed
from det_lightning.testing.training.reference import Conversion
from det_lightning.testing.training.runs import TrialRuns


def matches(runs: TrialRuns) -> None:
    """Batch by batch, weights and callbacks included."""
    conversion = runs.conversion
    difference = conversion.difference
    if difference is not None:
        changed = _changed_after_return(conversion)
        finding = "det_lightning does not train as the reference."
        if changed:
            finding = f"det_lightning reports {difference.name!r} as it was returned, the reference as it became later."
        raise CheckFailed(f"{finding} {difference}", causes=[*changed, difference.likely_cause])


def _changed_after_return(conversion: Conversion) -> list[str]:
    """Return what is known if only the mean of a metric differs, whose values are the same for every batch."""
    difference = conversion.difference
    if difference is None or difference.kind != "metric":
        return []
    theirs = conversion.reference.training_metrics()
    ours = conversion.ours.training_metrics()
    if not difference.part or theirs.get(difference.name) != ours.get(difference.name):
        return []
    return [
        f"train_batch() returns in {difference.name!r} a tensor that training changes later, such as the data of a "
        "weight. Determined reports what it has become by the end of the workload, det_lightning what it was when it "
        "was returned: return a copy (value.clone()) to have that on both"
    ]
