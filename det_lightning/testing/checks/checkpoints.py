"""Is everything that training changes in the checkpoint, and does it come back?"""

from __future__ import annotations

from pathlib import Path

from det_lightning.checkpoint import load_checkpoint
from det_lightning.errors import UnsafeCheckpointError
from det_lightning.testing.checks.lost_state import lost_state
from det_lightning.testing.observation.digests import amount, equal, flat, shown
from det_lightning.testing.outcomes import CheckFailed, NotChecked
from det_lightning.testing.training.runs import TrialRuns

__all__ = ["is_complete", "round_trips"]


def is_complete(runs: TrialRuns) -> None:
    """Nothing that the training changes, and looks at again, is missing after a resume."""
    straight, again = runs.require(runs.straight), runs.require(runs.again)
    batches = _checkpoint(runs)
    resumed = runs.resumed(straight, batches)
    if not resumed.observer.begun:
        runs.require(resumed)
    lost = lost_state(straight, again, resumed, batches)
    if lost:
        raise CheckFailed(
            f"{runs.setup.source.name} changes state that its checkpoints do not have:",
            [item.finding for item in lost],
            dict.fromkeys(item.cause for item in lost),
        )


def round_trips(runs: TrialRuns) -> None:
    """What was saved is what is there after loading it, and it can be read without running code."""
    straight = runs.require(runs.straight)
    batches = _checkpoint(runs)
    _require_safe(straight.checkpoints[batches])
    resumed = runs.resumed(straight, batches)
    if not resumed.observer.begun:
        runs.require(resumed)
    content = load_checkpoint(straight.checkpoints[batches], trusted=True).state
    parts = resumed.observer.parts - {"rng_state"}  # what callbacks add is theirs to look at when it is loaded
    saved = dict(flat({name: value for name, value in content.items() if name in parts}))
    loaded = {path: value for path, value in resumed.observer.loaded.items() if not path.startswith("rng_state")}
    for path in [*saved, *(path for path in loaded if path not in saved)]:
        one, other = saved.get(path), loaded.get(path)
        if path.startswith("callbacks.det_lightning.testing") or equal(one, other):
            continue
        apart = amount(one, other)
        raise CheckFailed(
            f"{path} was saved after {batches} batches as {shown(one)}, and is {shown(other)} when the checkpoint is "
            f"loaded{f', {apart:.3g} apart' if apart else ''}.",
            causes=[
                "load_state_dict() of a callback or scheduler that does not take all that its state_dict() returned",
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


def _checkpoint(runs: TrialRuns) -> int:
    batches = runs.boundaries.after_validation
    if batches not in runs.straight.checkpoints:
        raise NotChecked(
            f"the trial ended its run after {runs.straight.observer.batches} batches, before its first checkpoint"
        )
    return batches
