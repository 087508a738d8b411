"""Converts the typed configuration for a search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from det_lightning.config import ExperimentConfig, hyperparameters
from det_lightning.config.searchers import HalvingSearcher, RandomSearcher
from det_lightning.experiments import search
from det_lightning.experiments.search import SearcherSettings, SearchSpace
from det_lightning.experiments.search.brackets import brackets_of


def settings_of(config: ExperimentConfig) -> SearcherSettings:
    """Return the ``searcher`` section in the form that the search takes."""
    searcher = config.searcher
    not_of_the_search = {"source_trial_id", "source_checkpoint_uuid", "stop_once", "max_length"}
    section = {**searcher.model_dump(exclude=not_of_the_search), "metric": searcher.metric or ""}
    if isinstance(searcher, HalvingSearcher):
        section["max_time"] = searcher.full_time
        section["time_metric"] = searcher.clock
        section["force_validations"] = searcher.validates_at_rungs
    if "bracket_rungs" in section:
        section["bracket_rungs"] = tuple(section["bracket_rungs"])
    return SearcherSettings(**section)


def space_of(config: ExperimentConfig) -> SearchSpace:
    """Return the ``hyperparameters`` section in the form that the search takes."""
    return _group(config.hyperparameters)


def trials_in_full(config: ExperimentConfig) -> int | None:
    """Return how many trials the search trains to their end; None if that depends on their results."""
    searcher = config.searcher
    if searcher.name == "grid":
        return search.Grid(space_of(config)).size
    if searcher.name == "single":
        return 1
    return searcher.max_trials if isinstance(searcher, RandomSearcher) else None


def most_trials(config: ExperimentConfig) -> int:
    """Return how many trials the search creates at most, not counting the replacements of those with invalid values."""
    in_full = trials_in_full(config)
    if in_full is not None:
        return in_full
    return sum(bracket.max_trials for bracket in brackets_of(settings_of(config)))


def _group(entries: Mapping[str, Any]) -> SearchSpace:
    return {name: _entry(entry) for name, entry in entries.items()}


def _entry(entry: Any) -> Any:
    if isinstance(entry, dict):
        return _group(entry)
    if isinstance(entry, hyperparameters.Const):
        return search.Const(entry.val)
    if isinstance(entry, hyperparameters.Categorical):
        return search.Categorical(tuple(entry.vals))
    types: dict[str, Any] = {"int": search.Int, "double": search.Double, "log": search.Log}
    return types[entry.type](**entry.model_dump(exclude={"type"}))
