"""Converts the typed configuration for a search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from det_lightning.config import ExperimentConfig, hyperparameters
from det_lightning.config.searchers import RandomSearcher
from det_lightning.experiments import search
from det_lightning.experiments.search import SearcherSettings, SearchSpace


def settings_of(config: ExperimentConfig) -> SearcherSettings:
    """Return the ``searcher`` section in the form that the search takes."""
    not_of_the_search = {"source_trial_id", "source_checkpoint_uuid", "stop_once", "max_length"}
    section = config.searcher.model_dump(exclude=not_of_the_search)
    length = config.searcher.max_length
    if length is not None:
        section["max_length"] = search.Length(length.units, length.unit)
    if "bracket_rungs" in section:
        section["bracket_rungs"] = tuple(section["bracket_rungs"])
    return SearcherSettings(**{**section, "metric": config.searcher.metric or ""})


def space_of(config: ExperimentConfig) -> SearchSpace:
    """Return the ``hyperparameters`` section in the form that the search takes."""
    return _group(config.hyperparameters)


def trials_in_full(config: ExperimentConfig) -> int | None:
    """Return how many trials the search trains to their end; None if that depends on their results.

    Raises:
        ValueError: the search cannot be run; the message names all mistakes.
    """
    searcher = config.searcher
    if searcher.name == "grid":
        return len(search.planned_trials(settings_of(config), space_of(config), 0))
    if searcher.name == "single":
        return 1
    return searcher.max_trials if isinstance(searcher, RandomSearcher) else None


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
