"""Does a run that is stopped and resumed end like an uninterrupted one?"""

from __future__ import annotations

from collections.abc import Sequence

from det_lightning.testing.causes import usual_causes
from det_lightning.testing.checks.checkpoints import lost_state
from det_lightning.testing.checks.training import difference_of_runs
from det_lightning.testing.outcomes import CheckFailed, NotChecked
from det_lightning.testing.records.difference import Difference
from det_lightning.testing.training.execution import Run
from det_lightning.testing.training.runs import TrialRuns


def mid_epoch(runs: TrialRuns) -> None:
    """From a checkpoint between two batches of an epoch."""
    _require_equal_resume(runs, runs.straight, runs.boundaries.mid_epoch, "an epoch of this trial has one batch")


def epoch_end(runs: TrialRuns) -> None:
    """From a checkpoint at the end of an epoch."""
    reason = "the training loader of this trial has no length, so its epochs do not end"
    _require_equal_resume(runs, runs.straight, runs.boundaries.epoch_end, reason)


def after_validation(runs: TrialRuns) -> None:
    """From a checkpoint right after a validation."""
    _require_equal_resume(runs, runs.straight, runs.boundaries.after_validation)


def mid_aggregation(runs: TrialRuns) -> None:
    """From a checkpoint between two batches of one update."""
    runs.require(runs.straight)
    _require_equal_resume(runs, runs.aggregated, runs.boundaries.mid_aggregation(runs.aggregation_frequency))


def _require_equal_resume(runs: TrialRuns, run: Run, batches: int | None, reason: str = "") -> None:
    """Raise if a run resumed after ``batches`` batches ends differently; ``reason`` says why ``batches`` is None."""
    trained = runs.require(run).record.batches
    if batches is None:
        raise NotChecked(reason)
    if batches not in run.checkpoints or trained <= batches:
        raise NotChecked(f"the trial stopped after {trained} batches, and this check resumes after batch {batches}")
    resumed = runs.resumed(run, batches)
    if resumed.failure is not None:
        raise CheckFailed(
            f"A run that is resumed after {batches} batches fails {resumed.failure.description}",
            causes=["state that is made while training and is not in the checkpoint", *_suspects(runs)],
        )
    difference = difference_of_runs(run, resumed, after=batches)
    if difference is not None:
        raise CheckFailed(
            f"A run that is resumed after {batches} batches continues differently. {difference}",
            causes=[*_suspects(runs), *_late_changes(run, difference), *usual_causes("resume", difference.kind)],
        )


def _suspects(runs: TrialRuns) -> Sequence[str]:
    """Return the findings of state that is known to be missing from the checkpoint."""
    try:
        return [f"this state is not in the checkpoint: {finding}" for finding in lost_state(runs)]
    except NotChecked:
        return ()


def _late_changes(run: Run, difference: Difference) -> Sequence[str]:
    """Return a cause for each hook that changes a callback's state after the checkpoint has collected it."""
    if difference.kind != "callback state":
        return []
    hooks = run.observer.late_hooks.get(difference.name.partition(".")[0], ())
    return [
        f"{hook}() of the callback, which runs after the checkpoint has collected the callback's state: leave what it "
        "changes out of state_dict()"
        for hook in hooks
    ]
