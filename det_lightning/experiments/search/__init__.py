"""Hyperparameter search as in Determined 0.38.1, in plain Python: no clock, no files, no processes.

:class:`Search` answers events of trials with operations. The same events in the same order give the same operations, so
a log of events is all the state that needs to be kept: a new ``Search`` that replays the log continues the old one.
"""

from det_lightning.experiments.search.operations import (
    CreateTrial,
    ExitReason,
    Operation,
    Outcome,
    Shutdown,
    StopTrial,
    Warn,
)
from det_lightning.experiments.search.search import Search, planned_trials
from det_lightning.experiments.search.settings import SearcherSettings
from det_lightning.experiments.search.space import (
    Categorical,
    Const,
    Double,
    Grid,
    Hyperparameter,
    Int,
    Log,
    SearchSpace,
)

__all__ = [
    "Categorical",
    "Const",
    "CreateTrial",
    "Double",
    "ExitReason",
    "Grid",
    "Hyperparameter",
    "Int",
    "Log",
    "Operation",
    "Outcome",
    "Search",
    "SearchSpace",
    "SearcherSettings",
    "Shutdown",
    "StopTrial",
    "Warn",
    "planned_trials",
]
