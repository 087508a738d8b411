"""What a trial's training changes, and a resume does not bring back."""

from __future__ import annotations

import dataclasses

from det_lightning.testing.causes import usual_causes
from det_lightning.testing.observation.object_state import Holder, Leaf, ObjectState
from det_lightning.testing.training.execution import Run

_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class LostState:
    """What one object loses."""

    finding: str  # the object and what of it, in words
    cause: str  # what usually causes it, with the way out


def lost_state(straight: Run, again: Run, resumed: Run, batches: int) -> list[LostState]:
    """Return what is lost by resuming from the checkpoint after ``batches`` batches, by object.

    A value counts if training changed it, the same way in both uninterrupted runs (what the clock changes is not state
    of the training), if it has another value after the resume, and if that matters: it is read before it is written
    again. Where only the object that holds a value is seen to be read, the value must still differ at the end.

    Args:
        straight, again: two uninterrupted runs.
        resumed: the run that went on from the checkpoint.
        batches: which checkpoint.
    """
    saved = straight.observer.states[batches]
    elsewhere = again.observer.states.get(batches, {})
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
    return repr(one.value) == repr(other.value)


def _matters(path: str, leaf: Leaf, straight: Run, resumed: Run) -> bool:
    access = resumed.observer.access
    if access is not None and not access.is_read_first(*leaf.root):
        return False
    if leaf.direct and leaf.holder.kind in ("trial", "callback"):
        return True
    if resumed.failure is not None:
        is_there = any(known.root == leaf.root for known in resumed.observer.states["start"].values())
        return not is_there or leaf.holder.kind in ("model", "optimizer", "scheduler")
    ends = straight.observer.states.get("end", {}), resumed.observer.states.get("end", {})
    return not _same(ends[0].get(path), ends[1].get(path))


_WORDS = {"stateful": "object", "data": "dataset or sampler", "scheduler": "learning rate scheduler"}


def _described(holder: Holder, paths: list[str]) -> LostState:
    names = list(dict.fromkeys(_name_within(holder, path) for path in paths))
    shown = ", ".join(names[:_SHOWN]) + (f", ... ({len(names)} in all)" if len(names) > _SHOWN else "")
    what = _WORDS.get(holder.kind, holder.kind)
    subject = holder.path if holder.kind in ("callback", "trial") else f"{what} {holder.path}"
    (cause,) = usual_causes("lost", "attribute of a wrapped model" if holder.wrapped else holder.kind)
    return LostState(f"{subject} ({holder.type_name}): {shown}", cause)


def _name_within(holder: Holder, path: str) -> str:
    """Return what of its holder a path means; the length of a container stands for the container."""
    if path.startswith("len("):
        path = path[len("len(") : -1]
    return path.removeprefix(holder.path).lstrip(".")
