"""The settings of a search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearcherSettings:
    """The ``searcher`` section of an experiment configuration, with Determined's defaults.

    A 0 or an empty string stands for a value that the search does not have.
    """

    name: str
    metric: str
    smaller_is_better: bool = True
    max_trials: int = 0
    max_concurrent_trials: int = 16  # 0 means as many as it can use
    max_time: int = 0  # how long the halving methods let a trial train,
    time_metric: str = ""  # measured by a metric that comes with each validation, such as "batches" or "epochs"
    mode: str = "standard"
    divisor: float = 4.0
    max_rungs: int = 5
    bracket_rungs: tuple[int, ...] = ()  # the number of rungs of each bracket, in place of those of the mode
    num_rungs: int = 0  # of the only bracket of async_halving
    # Trials of the halving methods validate at the lengths of the rungs; otherwise a trial that validates only at its
    # end is never stopped early.
    force_validations: bool = False
