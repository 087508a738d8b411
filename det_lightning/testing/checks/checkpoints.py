"""Checks of checkpoints: a checkpoint has all state that training changes, and a resumed run ends the same."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from det_lightning.checkpoint import load_checkpoint
from det_lightning.errors import UnsafeCheckpointError
from det_lightning.testing.checks import CheckFailed, NotCompared, list_names
from det_lightning.testing.observation.object_state import MAX_LEAVES, Holder, Leaf, ObjectState
from det_lightning.testing.observation.source_scan import defines
from det_lightning.testing.recorder import describe
from det_lightning.testing.records.comparison import value_differences
from det_lightning.testing.records.difference import usual_causes
from det_lightning.testing.records.record import shorten_repr
from det_lightning.testing.training.execution import Run, compare_runs
from det_lightning.testing.training.trainings import TrialRuns

#: The cause of a loss of state, and whether the state is a result of training, or decides what the trial does.
Loss = tuple[str, bool]

# Kinds of holders whose attributes are results of training.
_RESULTS = ("model", "optimizer", "scheduler", "stateful")
# Run after the content of a checkpoint was collected.
_LATE_HOOKS = ("on_checkpoint_end", "on_checkpoint_write_end", "on_checkpoint_upload_end")
_CHECKPOINT_HOOKS = ("on_checkpoint_save_start", "on_checkpoint_load_start")
# Names in lines that change settings.
_SETTERS = {"hyperparameters": [".get_hparams", ".hparams", "hparams"], "environment": [".environ"]}
_WORDS = {"stateful": "object", "data": "dataset or sampler", "scheduler": "learning rate scheduler"}


def is_complete(runs: TrialRuns) -> list[str]:
    """Checkpoints hold all state that affects training; missing state that only affects messages is a remark."""
    lost = find_lost_state(runs)
    difference = _resumes_differently(runs)
    essential = lost if difference else {n: why for n, why in lost.items() if why[1]}
    if essential:
        raise CheckFailed(
            f"{runs.source.name} changes state that is not in its checkpoints:",
            *dict.fromkeys(cause for cause, _ in essential.values()),
            details=essential,
        )
    if difference and compare_runs(runs.straight, runs.again) is not None:
        raise NotCompared("two uninterrupted runs differ already")
    if difference:
        raise CheckFailed(f"A resumed run differs, and no state was found that explains it. {difference}")
    remarks = [
        f"{what} is not in the checkpoint, which changed nothing in {runs.options.batches} batches" for what in lost
    ]
    if len(runs.straight.observer.states["start"]) >= MAX_LEAVES:
        remarks.append(f"the trial's objects hold more than {MAX_LEAVES:,} values, of which only these were compared")
    return remarks


def _resumes_differently(runs: TrialRuns) -> str:
    """Return how a resumed run fails or differs from the uninterrupted one; empty if it does not."""
    straight = runs.straight
    boundaries = (runs.boundaries.after_validation, runs.boundaries.epoch_end, runs.boundaries.mid_epoch)
    for batches in (batches for batches in boundaries if batches in straight.checkpoints):
        resumed = runs.resume(straight, batches)
        if resumed.failure is not None:
            return f"It fails {resumed.failure.description}"
        if (difference := compare_runs(straight, resumed, after=batches)) is not None:
            return str(difference)
    return ""


def round_trips(runs: TrialRuns) -> None:
    """Loading a checkpoint restores the saved state, and executes no code."""
    straight = runs.require(runs.straight)
    batches, resumed = _resume_after_validation(runs, straight)
    _require_safe(runs, straight.checkpoints[batches])
    content = load_checkpoint(straight.checkpoints[batches], trusted=True).state
    # The random state advances, and additions of callbacks are the callbacks' own business.
    loaded = {name: value for name, value in resumed.observer.loaded.items() if name != "rng_state"}
    saved = {name: describe(content[name]) for name in loaded if name in content}
    saved["callbacks"] = {name: value for name, value in saved["callbacks"].items() if name in loaded["callbacks"]}
    for difference in value_differences("state", "", saved, loaded):
        apart = f", {difference.absolute:.3g} apart" if difference.absolute else ""
        raise CheckFailed(
            f"{difference.name} was saved after {batches} batches as {shorten_repr(difference.reference)}, and is "
            f"{shorten_repr(difference.ours)} after the checkpoint was loaded{apart}.",
            "load_state_dict() of a callback or scheduler that does not restore all that its state_dict() returned",
            "a callback that changes the checkpoint in on_checkpoint_save_start or on_checkpoint_load_start",
            details=runs.code.find(*map(defines, ("load_state_dict", *_CHECKPOINT_HOOKS))),
        )


def _require_safe(runs: TrialRuns, checkpoint: Path) -> None:
    try:
        load_checkpoint(checkpoint)
    except UnsafeCheckpointError as e:
        raise CheckFailed(
            f"The checkpoint is refused when it is loaded: {str(e).replace(f'{checkpoint}/', '')}",
            "the state_dict() of a learning rate scheduler or callback that returns all attributes, such as "
            "hyperparameters in a class of the trial: keep plain values there, or resume with fit(..., trusted=True)",
            details=runs.code.find(*map(defines, ("state_dict", *_CHECKPOINT_HOOKS))),
        ) from None


def _resume_after_validation(runs: TrialRuns, straight: Run) -> tuple[int, Run]:
    """Return the position of the checkpoint after a validation, and the run resumed from it."""
    batches = runs.boundaries.after_validation
    if batches not in straight.checkpoints:
        raise NotCompared(f"the trial stopped after {straight.record.batches} batches, before its first checkpoint")
    resumed = runs.resume(straight, batches)
    if not resumed.training_began:
        runs.require(resumed)
    return batches, resumed


def find_lost_state(runs: TrialRuns) -> dict[str, Loss]:
    """Return a finding for each object that loses state over a resume, with the reason.

    A value counts if both uninterrupted runs changed it in the same way (unlike a clock), if it differs after the
    resume, and if the resumed run reads it before writing it. If only its outermost object is known to be read, it must
    also still differ at the end. Raises NotCompared if a run failed.
    """
    straight = runs.require(runs.straight)
    again = runs.require(runs.again)
    batches, resumed = _resume_after_validation(runs, straight)
    start = straight.observer.states["start"]
    saved = straight.observer.states[batches]
    elsewhere = again.observer.states.get(batches, {})
    found: dict[Holder, list[str]] = {}
    for path in dict.fromkeys([*start, *saved]):
        leaf = saved.get(path)
        is_lost = not _are_same(start.get(path), leaf) and not _are_same(
            leaf, resumed.observer.states["start"].get(path)
        )
        known = leaf or start[path]
        if is_lost and _are_same(leaf, elsewhere.get(path)) and _matters(path, known, straight, resumed):
            found.setdefault(known.holder, []).append(path)
    lines = runs.code.find_changes()
    deciding = runs.code.find_deciding()
    known_leaves = {**start, **saved}
    losses = {}
    for holder, paths in found.items():
        decides = not deciding.isdisjoint(_first_words(holder, paths))
        holds_arrays = any(known_leaves[path].is_array for path in paths)
        is_result = holder.kind in _RESULTS and (holder.kind != "model" or holds_arrays)
        kind = "attribute of a wrapped model" if holder.wrapped else holder.kind
        losses[_describe_loss(holder, paths, lines)] = (usual_causes("lost", kind)[0], decides or is_result)
    return losses


def _are_same(one: Leaf | None, other: Leaf | None) -> bool:
    return (one and one.text) == (other and other.text)


def _matters(path: str, leaf: Leaf, straight: Run, resumed: Run) -> bool:
    if not resumed.observer.access.is_read_first(*leaf.root):
        return False
    if leaf.direct and leaf.holder.kind in ("trial", "callback"):
        return True
    if resumed.failure is not None:
        is_there = any(known.root == leaf.root for known in resumed.observer.states["start"].values())
        return not is_there or leaf.holder.kind in ("model", "optimizer", "scheduler")
    ends: list[ObjectState] = [run.observer.states.get("end", {}) for run in (straight, resumed)]
    return not _are_same(ends[0].get(path), ends[1].get(path))


def _relative_names(holder: Holder, paths: list[str]) -> list[str]:
    """Return the paths below the holder, without what is inside a container that is itself among them."""
    names = dict.fromkeys(path.removeprefix(holder.path).lstrip(".") for path in paths)
    return [name for name in names if name == (first := re.split(r"[\[.(]", name)[0]) or first not in names]


def _first_words(holder: Holder, paths: list[str]) -> list[str]:
    """Return the names of attributes or variables at the start of paths."""
    return [word for name in _relative_names(holder, paths) for word in re.findall(r"\w+", name)[:1]]


def _describe_loss(holder: Holder, paths: list[str], lines: Mapping[str, str]) -> str:
    names_itself = holder.kind in ("callback", "trial") or holder.path.startswith("the ")
    kind = "" if names_itself else f"{_WORDS.get(holder.kind, holder.kind)} "
    names = [*_first_words(holder, paths), holder.path.rpartition(".")[2]]
    words = _SETTERS.get(holder.kind, names if holder.kind == "module" else [f".{name}" for name in names])
    line = next((f" ({lines[word]})" for word in words if word in lines), "")
    return f"{kind}{holder.path} ({holder.type_name}): {list_names(_relative_names(holder, paths))}{line}"


def mid_epoch(runs: TrialRuns) -> None:
    """A run resumed between two batches of an epoch ends as if never interrupted."""
    _require_equal_resume(runs, runs.straight, runs.boundaries.mid_epoch, "an epoch of this trial has one batch")


def epoch_end(runs: TrialRuns) -> None:
    """A run resumed at the end of an epoch ends as if never interrupted."""
    reason = "the training loader of this trial has no length, so its epochs do not end"
    _require_equal_resume(runs, runs.straight, runs.boundaries.epoch_end, reason)


def after_validation(runs: TrialRuns) -> None:
    """A run resumed right after a validation ends as if never interrupted."""
    _require_equal_resume(runs, runs.straight, runs.boundaries.after_validation)


def mid_aggregation(runs: TrialRuns) -> None:
    """A run resumed within an aggregation ends as if never interrupted."""
    runs.require(runs.straight)
    _require_equal_resume(runs, runs.aggregation, runs.boundaries.mid_aggregation(runs.aggregation_frequency))


def _require_equal_resume(runs: TrialRuns, run: Run, batches: int | None, reason: str = "") -> None:
    """Raise if a run resumed after ``batches`` batches ends differently; ``reason`` says why ``batches`` is None."""
    trained = runs.require(run).record.batches
    if batches is None:
        raise NotCompared(reason)
    if batches not in run.checkpoints or trained <= batches:
        raise NotCompared(f"the trial stopped after {trained} batches, and this check resumes after batch {batches}")
    resumed = runs.resume(run, batches)
    if resumed.failure is not None:
        raise CheckFailed(
            f"A run that is resumed after {batches} batches fails {resumed.failure.description}",
            "state that is made while training and is not in the checkpoint",
            *_find_suspects(runs),
        )
    if (difference := compare_runs(run, resumed, after=batches)) is not None:
        raise CheckFailed(
            f"A run that is resumed after {batches} batches continues differently. {difference}",
            *(_find_suspects(runs) or usual_causes("resume", difference.kind)),
            *(_find_late_changes(runs) if difference.kind == "callback state" else []),
            details=runs.code.find(defines("load_state_dict")) if difference.kind == "data" else (),
        )


def _find_suspects(runs: TrialRuns) -> list[str]:
    with contextlib.suppress(NotCompared):
        return [f"this state is not in the checkpoint: {finding}" for finding in find_lost_state(runs)]
    return []


def _find_late_changes(runs: TrialRuns) -> list[str]:
    """Return the hooks that may change a callback's state after a checkpoint has collected it."""
    return [
        f"{line.partition(': ')[0]}: {hook}() of the callback, which runs after the checkpoint has collected the "
        "callback's state: leave what it changes out of state_dict()"
        for hook in _LATE_HOOKS
        for line in runs.code.find(defines(hook))
    ]
