"""Is everything that training changes in the checkpoint, and does it come back?"""

from __future__ import annotations

from pathlib import Path

from det_lightning.checkpoint import load_checkpoint
from det_lightning.errors import UnsafeCheckpointError
from det_lightning.testing.evidence import Evidence
from det_lightning.testing.outcomes import BrokenPromise, UncheckedPromise
from det_lightning.testing.watching.digests import amount, equal, flat, shown
from det_lightning.testing.watching.lost_state import lost_state

__all__ = ["is_complete", "round_trips"]


def is_complete(evidence: Evidence) -> None:
    """Nothing that the training changes, and looks at again, is missing after a resume."""
    straight, again = evidence.require(evidence.straight), evidence.require(evidence.again)
    batches = _checkpoint(evidence)
    resumed = evidence.resumed(straight, batches)
    if not resumed.observer.begun:
        evidence.require(resumed)
    lost = lost_state(straight, again, resumed, batches)
    if lost:
        raise BrokenPromise(
            f"{evidence.setup.source.name} changes state that its checkpoints do not have:",
            [item.finding for item in lost],
            dict.fromkeys(item.cause for item in lost),
        )


def round_trips(evidence: Evidence) -> None:
    """What was saved is what is there after loading it, and it can be read without running code."""
    straight = evidence.require(evidence.straight)
    batches = _checkpoint(evidence)
    _require_safe(straight.checkpoints[batches])
    resumed = evidence.resumed(straight, batches)
    if not resumed.observer.begun:
        evidence.require(resumed)
    content = load_checkpoint(straight.checkpoints[batches], trusted=True).state
    parts = resumed.observer.parts - {"rng_state"}  # what callbacks add is theirs to look at when it is loaded
    saved = dict(flat({name: value for name, value in content.items() if name in parts}))
    loaded = {path: value for path, value in resumed.observer.loaded.items() if not path.startswith("rng_state")}
    for path in [*saved, *(path for path in loaded if path not in saved)]:
        one, other = saved.get(path), loaded.get(path)
        if path.startswith("callbacks.det_lightning.testing") or equal(one, other):
            continue
        apart = amount(one, other)
        raise BrokenPromise(
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
        raise BrokenPromise(
            f"The checkpoint is refused when it is loaded: {str(e).replace(f'{checkpoint}/', '')}",
            causes=[
                "the state_dict() of a learning rate scheduler or callback that returns all attributes, such as "
                "hyperparameters in a class of the trial's own: keep plain values there, or resume with "
                "fit(..., trusted=True)"
            ],
        ) from None


def _checkpoint(evidence: Evidence) -> int:
    batches = evidence.timetable.after_validation
    if batches not in evidence.straight.checkpoints:
        raise UncheckedPromise(
            f"the trial ended its run after {evidence.straight.observer.batches} batches, before its first checkpoint"
        )
    return batches
