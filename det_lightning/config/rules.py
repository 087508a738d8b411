"""Rules across sections: missing fields, grids without ``count``, unusable lengths, too few ``max_slots``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from det_lightning.config.document import KeyPath
from det_lightning.config.experiment import ExperimentConfig
from det_lightning.config.hyperparameters import Categorical, Const, Hyperparameter, Int, leaves
from det_lightning.config.searchers import GridSearcher, HalvingSearcher
from det_lightning.config.section import show_value
from det_lightning.hyperparameters import convert_like_master

_Mistake = tuple[KeyPath, str]
_PERIODS = ("min_validation_period", "min_checkpoint_period")


def broken_rules(
    config: ExperimentConfig, unreadable: set[str], *, partial: bool, forgiving: bool
) -> Iterator[_Mistake]:
    """Yield each mistake across the readable sections, with the path; sections in ``unreadable`` are skipped.

    A ``partial`` configuration may lack the fields needed by experiments only. With ``forgiving``, a call may supply
    the training length and the hyperparameters.
    """
    if not partial:
        yield from _incomplete(config, unreadable)
    if not unreadable & {"workspace", "project"} and bool(config.workspace) != bool(config.project):
        missing = "project" if config.workspace else "workspace"
        yield (missing,), "is missing: set both workspace and project, or neither"
    resources = config.resources
    if resources.max_slots is not None and resources.slots_per_trial > resources.max_slots:
        message = f"must be at least slots_per_trial, {resources.slots_per_trial}; got {resources.max_slots}"
        yield ("resources", "max_slots"), message
    if unreadable & {"searcher", "hyperparameters"}:
        return
    for path, entry in leaves(config.hyperparameters) if isinstance(config.searcher, GridSearcher) else ():
        if not isinstance(entry, Const | Categorical) and entry.count is None:
            yield ("hyperparameters", *path, "count"), "is missing: a grid needs to know how many values to take"
    if not forgiving and config.trial_class is not None:
        yield from _unusable_in_a_loop(config, partial=partial)


def _incomplete(config: ExperimentConfig, unreadable: set[str]) -> Iterator[_Mistake]:
    if config.entrypoint is None and "entrypoint" not in unreadable:
        yield ("entrypoint",), "is missing: write module:Class, or the command that trains"
    if "searcher" in unreadable:
        return
    if "searcher" not in config.model_fields_set:
        yield ("searcher",), "is missing: write name, metric and max_length"
    elif config.searcher.metric is None:
        yield ("searcher", "metric"), "is missing: write the name of the validation metric to search by"
    if config.searcher.source_trial_id is not None:
        message = "names a trial of Determined's master, unknown here: write the id or the path of the trial's newest"
        yield ("searcher", "source_trial_id"), f"{message} checkpoint as source_checkpoint_uuid"


def _unusable_in_a_loop(config: ExperimentConfig, *, partial: bool) -> Iterator[_Mistake]:
    """Yield lengths and batch sizes unusable in the training loop of a trial class, perhaps usable in a script."""
    searcher = config.searcher
    length = searcher.max_length
    if length is None and not isinstance(searcher, HalvingSearcher) and not partial:
        yield ("searcher", "max_length"), "is missing: write how long a trial trains, such as {epochs: 10}"
    if length is not None and length.unit is None:
        yield ("searcher", "max_length"), f"needs a unit for a trial class, such as {{batches: {length.units}}}"
    if length is None and isinstance(searcher, HalvingSearcher) and searcher.clock not in ("batches", "epochs"):
        message = f"must be batches or epochs for a trial class without max_length; got {searcher.clock}"
        yield ("searcher", "time_metric"), message
    batch_sizes = _batch_sizes(config.hyperparameters.get("global_batch_size"))
    for wrong in [size for size in batch_sizes if not _is_count(size)][:1]:
        message = f"must be an integer, at least 1, for a trial class; got {show_value(wrong)}"
        yield ("hyperparameters", "global_batch_size"), message
    if batch_sizes:
        return
    periods = [((name,), getattr(config, name)) for name in _PERIODS]
    for path, given in [(("searcher", "max_length"), length), *periods]:
        if given is not None and given.unit == "records" and given.units:
            message = "records cannot be converted to batches: there is no hyperparameter global_batch_size"
            yield (*path, "records"), message


def _batch_sizes(entry: Hyperparameter | None) -> list[Any]:
    """Return values of ``global_batch_size``, of a range only the smallest; none if there is no batch size."""
    if entry is None:
        return []
    if isinstance(entry, dict):
        return ["a group"]
    if isinstance(entry, Const):
        return [] if entry.val is None else [entry.val]
    if isinstance(entry, Categorical):
        return entry.vals
    return [entry.minval if isinstance(entry, Int) else f"type: {entry.type}"]


def _is_count(value: Any) -> bool:
    value = convert_like_master(value)
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
