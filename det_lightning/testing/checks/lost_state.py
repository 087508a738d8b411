"""What a trial's training changes, and a resume does not bring back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from det_lightning.testing.observation.digests import equal
from det_lightning.testing.observation.object_state import Holder, Leaf, ObjectState
from det_lightning.testing.training.execution import ObservedRun

__all__ = ["LostState", "lost_state"]

_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class LostState:
    """What one object loses.

    Attributes:
        finding: the object and what of it, in words.
        cause: what usually causes it, with the way out.
    """

    finding: str
    cause: str


def lost_state(straight: ObservedRun, again: ObservedRun, resumed: ObservedRun, batches: int) -> list[LostState]:
    """Return what is lost by resuming from the checkpoint after ``batches`` batches, by object.

    A value counts if training changed it, the same way in both uninterrupted runs (what the clock changes is no state
    of the training), if it has another value after the resume, and if that matters: it is read before it is written
    again. Where only the object that holds a value is seen to be read, the value must still differ at the end.

    Args:
        straight, again: two uninterrupted runs.
        resumed: the run that went on from the checkpoint.
        batches: which checkpoint.
    """
    saved, elsewhere = straight.observer.states[batches], again.observer.states.get(batches, {})
    found: dict[Holder, list[str]] = {}
    for path in _changed(straight.observer.states["start"], saved):
        leaf = saved.get(path)
        known = leaf or straight.observer.states["start"][path]
        is_lost = not _same(leaf, resumed.observer.states["start"].get(path))
        if is_lost and _same(leaf, elsewhere.get(path)) and _matters(path, known, straight, resumed):
            found.setdefault(known.holder, []).append(path)
    return [_described(holder, paths) for holder, paths in found.items()]


def _changed(before: ObjectState, after: ObjectState) -> list[str]:
    paths = [*before, *(path for path in after if path not in before)]
    return [path for path in paths if not _same(before.get(path), after.get(path))]


def _same(one: Leaf | None, other: Leaf | None) -> bool:
    if one is None or other is None:
        return one is other
    return equal(one.value, other.value)


def _matters(path: str, leaf: Leaf, straight: ObservedRun, resumed: ObservedRun) -> bool:
    order = resumed.observer.order
    if order is not None and not order.is_read_first(*leaf.root):
        return False
    if leaf.direct and leaf.holder.kind in ("trial", "callback"):
        return True
    if resumed.failure is not None:
        is_there = any(known.root == leaf.root for known in resumed.observer.states["start"].values())
        return not is_there or leaf.holder.kind in ("model", "optimizer", "scheduler")
    ends = straight.observer.states.get("end", {}), resumed.observer.states.get("end", {})
    return not _same(ends[0].get(path), ends[1].get(path))


_WORDS = {"stateful": "object", "data": "dataset or sampler", "scheduler": "learning rate scheduler"}
_CAUSES: Mapping[str, str] = {
    "model": "a model that is not wrapped: model = context.wrap_model(model)",
    "optimizer": "an optimizer that is not wrapped: optimizer = context.wrap_optimizer(optimizer)",
    "scheduler": "a learning rate scheduler that is not wrapped: context.wrap_lr_scheduler(scheduler, step_mode)",
    "callback": "a callback whose state_dict() does not return, or whose load_state_dict() does not restore, what it "
    "changes",
    "trial": "an attribute of the trial that changes: keep it in a callback, whose state_dict() returns it",
    "data": "data that change while they are read: make what changes depend on the seed, the epoch and the index",
    "object": "an object without a place in the checkpoint: return its state from the state_dict() of a callback",
    "stateful": "an object without a place in the checkpoint: return its state_dict() from that of a callback",
    "class": "state on a class: keep it in a callback, whose state_dict() returns it",
    "module": "a global variable that changes: keep it in a callback, whose state_dict() returns it",
}


def _described(holder: Holder, paths: list[str]) -> LostState:
    names = list(dict.fromkeys(_name_within(holder, path) for path in paths))
    shown = ", ".join(names[:_SHOWN]) + (f", ... ({len(names)} in all)" if len(names) > _SHOWN else "")
    what = _WORDS.get(holder.kind, holder.kind)
    subject = holder.path if holder.kind in ("callback", "trial") else f"{what} {holder.path}"
    cause = _CAUSES[holder.kind]
    if holder.wrapped:
        cause = "an attribute of a wrapped model that is no parameter and no persistent buffer: register_buffer(...)"
    return LostState(f"{subject} ({holder.type_name}): {shown}", cause)


def _name_within(holder: Holder, path: str) -> str:
    """Return what of its holder a path means; the length of a container stands for the container."""
    if path.startswith("len("):
        path = path[len("len(") : -1]
    return path.removeprefix(holder.path).lstrip(".")
