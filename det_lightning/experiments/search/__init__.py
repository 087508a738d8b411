"""Hyperparameter search as in Determined 0.38.1, in plain Python: no clock, no files, no processes.

:class:`Search` answers events of trials with operations. The same events in the same order give the same operations, so
a log of events is the only state to keep: a new ``Search`` continues an old one by replaying the log.
"""

from det_lightning.experiments.search.operations import (
    CreateTrial,
    ExitReason,
    Operation,
    Outcome,
    SearcherSettings,
    Shutdown,
    StopTrial,
    Warn,
)
from det_lightning.experiments.search.search import Search, plan_trials
from det_lightning.experiments.search.space import Grid

__all__ = [
    "CreateTrial",
    "ExitReason",
    "Grid",
    "Operation",
    "Outcome",
    "Search",
    "SearcherSettings",
    "Shutdown",
    "StopTrial",
    "Warn",
    "plan_trials",
]
