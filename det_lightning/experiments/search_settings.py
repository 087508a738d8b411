"""The settings of a search from a configuration, and how many trials the search creates."""

from __future__ import annotations

from det_lightning.config import ExperimentConfig
from det_lightning.config.searchers import HalvingSearcher, RandomSearcher
from det_lightning.experiments.search import Grid, SearcherSettings
from det_lightning.experiments.search.halving import make_brackets


def make_settings(config: ExperimentConfig) -> SearcherSettings:
    """Return the ``searcher`` section as settings of a search."""
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


def count_full_trials(config: ExperimentConfig) -> int | None:
    """Return the number of trials that the search trains to the end; None if results decide."""
    searcher = config.searcher
    if searcher.name == "grid":
        return Grid(config.hyperparameters).size
    if searcher.name == "single":
        return 1
    return searcher.max_trials if isinstance(searcher, RandomSearcher) else None


def count_most_trials(config: ExperimentConfig) -> int:
    """Return the largest possible number of trials, without replacements of invalid trials."""
    in_full = count_full_trials(config)
    if in_full is not None:
        return in_full
    return sum(bracket.max_trials for bracket in make_brackets(make_settings(config)))
