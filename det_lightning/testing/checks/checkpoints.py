"""Is everything that training changes in the checkpoint, and does it come back?"""

from __future__ import annotations

from pathlib import Path

from det_lightning.checkpoint import load_checkpoint
from det_lightning.errors import UnsafeCheckpointError
from det_lightning.testing.checks.lost_state import lost_state
from det_lightning.testing.outcomes import CheckFailed, NotChecked
from det_lightning.testing.recorder import describe
from det_lightning.testing.records.comparison import value_differences
from det_lightning.testing.records.values import shown
from det_lightning.testing.training.execution import Run
from det_lightning.testing.training.runs import TrialRuns


def is_complete(runs: TrialRuns) -> None:
    """Nothing that the training changes, and looks at again, is missing after a resume."""
    straight = runs.require(runs.straight)
    again = runs.require(runs.again)
    batches, resumed = _resumed(runs, straight)
    lost = lost_state(straight, again, resumed, batches)
    if lost:
        raise CheckFailed(
            f"{runs.source.name} changes state that its checkpoints do not have:",
            [item.finding for item in lost],
            dict.fromkeys(item.cause for item in lost),
        )


def round_trips(runs: TrialRuns) -> None:
    """What was saved is what is there after loading it, and it can be read without running code."""
    straight = runs.require(runs.straight)
    batches, resumed = _resumed(runs, straight)
    _require_safe(straight.checkpoints[batches])
    content = load_checkpoint(straight.checkpoints[batches], trusted=True).state
    # The random state goes on, and what callbacks add is theirs to look at when it is loaded.
    loaded = {name: value for name, value in resumed.observer.loaded.items() if name != "rng_state"}
    saved = {name: describe(content[name]) for name in loaded if name in content}
    saved["callbacks"] = {name: value for name, value in saved["callbacks"].items() if name in loaded["callbacks"]}
    for difference in value_differences("state", "", saved, loaded):
        apart = f", {difference.absolute:.3g} apart" if difference.absolute else ""
        raise CheckFailed(
            f"{difference.name} was saved after {batches} batches as {shown(difference.reference)}, and is "
            f"{shown(difference.ours)} when the checkpoint is loaded{apart}.",
            causes=[
                "load_state_dict() of a callback or scheduler that does not restore all that its state_dict() returned",
                "a callback that changes the checkpoint in on_checkpoint_save_start or on_checkpoint_load_start",
            ],
        )


def _require_safe(checkpoint: Path) -> None:
    try:
        load_checkpoint(checkpoint)
    except UnsafeCheckpointError as e:
        raise CheckFailed(
            f"The checkpoint is refused when it is loaded: {str(e).replace(f'{checkpoint}/', '')}",
            causes=[
                "the state_dict() of a learning rate scheduler or callback that returns all attributes, such as "
                "hyperparameters in a class of the trial's own: keep plain values there, or resume with "
                "fit(..., trusted=True)"
            ],
        ) from None


def _resumed(runs: TrialRuns, straight: Run) -> tuple[int, Run]:
    """Return after how many batches a checkpoint was written, and the run that goes on from it."""
    batches = runs.boundaries.after_validation
    if batches not in straight.checkpoints:
        raise NotChecked(
            f"the trial ended its run after {straight.record.batches} batches, before its first checkpoint"
        )
    resumed = runs.resumed(straight, batches)
    if not resumed.training_began:
        runs.require(resumed)
    return batches, resumed
