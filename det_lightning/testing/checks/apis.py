"""Does the trial train the same under Determined's door and under Lightning's?"""

from __future__ import annotations

from det_lightning.testing.outcomes import CheckFailed
from det_lightning.testing.training.run_differences import first_difference
from det_lightning.testing.training.runs import TrialRuns

__all__ = ["trains_equally"]


def trains_equally(runs: TrialRuns) -> None:
    """``Trainer(trial, context).fit()`` and ``pl.Trainer().fit(TrialModule(...))`` give the same numbers."""
    straight = runs.require(runs.straight)
    lightning = runs.under_lightning
    if lightning.failure is not None:
        raise CheckFailed(
            f"Under pl.Trainer the trial fails {lightning.failure.told}",
            causes=["code that asks the context for what only a script with init() gives it"],
        )
    difference = first_difference(straight, lightning)
    if difference is not None:
        raise CheckFailed(
            f"The two doors do not train the same. First difference: {difference}",
            causes=[
                "random draws when the module is imported or the class is made, before the seed is set",
                "state in globals or on the class that the first run left behind",
            ],
        )
