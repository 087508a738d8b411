"""Does a run that was stopped and resumed end as one that was not?"""

from __future__ import annotations

from collections.abc import Sequence

from det_lightning.testing.causes import usual_causes
from det_lightning.testing.checks.lost_state import lost_state
from det_lightning.testing.checks.training import difference_of_runs
from det_lightning.testing.outcomes import CheckFailed, NotChecked
from det_lightning.testing.records.difference import Difference
from det_lightning.testing.training.execution import Run
from det_lightning.testing.training.runs import TrialRuns


def mid_epoch(runs: TrialRuns) -> None:
    """From a checkpoint between two batches of an epoch."""
    runs.require(runs.straight)
    if runs.boundaries.mid_epoch is None:
        raise NotChecked("an epoch of this trial has one batch")
    require_equal_resume(runs, runs.straight, runs.boundaries.mid_epoch)


def epoch_end(runs: TrialRuns) -> None:
    """From a checkpoint at the end of an epoch."""
    runs.require(runs.straight)
    if runs.boundaries.epoch_end is None:
        raise NotChecked("the training loader of this trial has no length, so its epochs do not end")
    require_equal_resume(runs, runs.straight, runs.boundaries.epoch_end)


def after_validation(runs: TrialRuns) -> None:
    """From a checkpoint right after a validation."""
    require_equal_resume(runs, runs.straight, runs.boundaries.after_validation)


def mid_aggregation(runs: TrialRuns) -> None:
    """From a checkpoint between two batches of one update."""
    runs.require(runs.straight)
    batches = runs.boundaries.mid_aggregation(runs.aggregation_frequency)
    assert batches is not None
    require_equal_resume(runs, runs.aggregated, batches)


def require_equal_resume(runs: TrialRuns, run: Run, batches: int) -> None:
    """Raise if a resume from the checkpoint after ``batches`` batches does not end as ``run``."""
    runs.require(run)
    trained = run.record.batches
    if batches not in run.checkpoints or trained <= batches:
        raise NotChecked(f"the trial ended its run itself after {trained} batches, and this is about batch {batches}")
    resumed = runs.resumed(run, batches)
    if resumed.failure is not None:
        failure = resumed.failure
        raise CheckFailed(
            f"A run that is resumed after {batches} batches fails {failure.description}",
            causes=["state that is made while training and is not in the checkpoint", *_suspects(runs)],
        )
    difference = difference_of_runs(run, resumed, after=batches)
    if difference is not None:
        raise CheckFailed(
            f"A run that is resumed after {batches} batches goes on differently. {difference}",
            causes=[*_suspects(runs), *_late_changes(run, difference), *usual_causes("resume", difference.kind)],
        )


def _suspects(runs: TrialRuns) -> Sequence[str]:
    """Return what is known to be lost over a checkpoint."""
    straight = runs.straight
    batches = runs.boundaries.after_validation
    if straight.failure is not None or runs.again.failure is not None or batches not in straight.checkpoints:
        return ()
    resumed = runs.resumed(straight, batches)
    if not resumed.training_began:
        return ()
    lost = lost_state(straight, runs.again, resumed, batches)
    return [f"this state is not in the checkpoint: {item.finding}" for item in lost]


def _late_changes(run: Run, difference: Difference) -> Sequence[str]:
    """Return what changes a callback when the checkpoint has taken its state already."""
    if difference.kind != "callback state":
        return []
    hooks = run.observer.late_hooks.get(difference.name.partition(".")[0], ())
    return [
        f"what {hook}() of the callback changes: the checkpoint took the callback's state before; leave it out of "
        "state_dict()"
        for hook in hooks
    ]
