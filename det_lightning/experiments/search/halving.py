"""Asynchronous halving: search methods that stop trials early, and the brackets and rungs of trials."""

from __future__ import annotations

import bisect
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from det_lightning.experiments.search.operations import (
    MOST_AT_ONCE,
    CreateTrial,
    ExitReason,
    Operation,
    StopTrial,
    TrialFactory,
    Warn,
    most_replaced,
)

if TYPE_CHECKING:
    from det_lightning.config.searchers import AdaptiveAshaSearcher, AsyncHalvingSearcher

#: The metric of a failed trial: ranks behind every metric except infinity and NaN.
_FAILED = sys.float_info.max


@dataclass(frozen=True)
class Bracket:
    """A group of trials to compare with each other."""

    rungs: tuple[int, ...]  # the lengths at which to compare, ascending
    max_trials: int  # without invalid hyperparameters
    initial_trials: int  # created at the start; the others follow stopped or failed trials


def make_brackets(searcher: AdaptiveAshaSearcher | AsyncHalvingSearcher) -> list[Bracket]:
    """Return the brackets of a halving search, most rungs first."""
    divisor = searcher.divisor
    at_once = searcher.max_concurrent_trials
    if searcher.name == "async_halving":
        counts = [searcher.num_rungs]
        trials = [searcher.max_trials]
        concurrent = [at_once or int(divisor ** (searcher.num_rungs - 1))]
    else:
        counts = sorted(searcher.bracket_rungs or _count_rungs(searcher), reverse=True)
        trials = _divide_trials(searcher.max_trials, divisor, counts)
        concurrent = _divide_concurrency(at_once, divisor, trials)
    return [
        Bracket(
            tuple(max(int(searcher.full_time / divisor ** (num_rungs - 1 - rung)), 1) for rung in range(num_rungs)),
            max_trials,
            min(initial_trials, max_trials, MOST_AT_ONCE),
        )
        for num_rungs, max_trials, initial_trials in zip(counts, trials, concurrent, strict=True)
    ]


def _count_rungs(searcher: AdaptiveAshaSearcher) -> range:
    # In floats, like Determined: for 3**5 and 3, or 10**3 and 10, the result is one less than the exact one.
    of_time, of_trials = (
        int(math.log(number) / math.log(searcher.divisor)) + 1 for number in (searcher.full_time, searcher.max_trials)
    )
    most = min(searcher.max_rungs, of_time, of_trials)
    least = {"aggressive": most, "standard": (most - 1) // 2 + 1, "conservative": 1}[searcher.mode]
    return range(least, most + 1)


def _divide_trials(max_trials: int, divisor: float, counts: list[int]) -> list[int]:
    """Divide the trials so that all brackets train for about as long; the total may exceed ``max_trials``."""
    weights = [divisor ** (num_rungs - 1) / num_rungs for num_rungs in counts]
    total = sum(weights)
    trials = [max(int(weight / total * max_trials), 1) for weight in weights]
    trials[0] += max(max_trials - sum(trials), 0)
    return trials


def _divide_concurrency(max_concurrent_trials: int, divisor: float, trials: list[int]) -> list[int]:
    if max_concurrent_trials == 0:
        return [max(trials[-1], int(divisor))] * len(trials)
    each, remainder = divmod(max(max_concurrent_trials, len(trials)), len(trials))
    return [each + 1 if bracket < remainder else each for bracket in range(len(trials))]


class Rung:
    """The trials after ``length`` of training: sorted pairs of a metric (smaller is better) and a trial's id."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.metrics: list[tuple[float, int]] = []

    def insert(self, trial_id: int, metric: float) -> int:
        """Insert a metric before equal metrics, or NaN behind all others; return the index."""
        if math.isnan(metric):
            metric = math.inf
            index = len(self.metrics)
        else:
            index = bisect.bisect_left(self.metrics, metric, key=lambda entry: entry[0])
        self.metrics.insert(index, (metric, trial_id))
        return index

    def remove(self, trial_id: int) -> None:
        self.metrics = [entry for entry in self.metrics if entry[1] != trial_id]


class HalvingBracket:
    """The trials of a bracket.

    A validation counts in each rung from the trial's current rung up to the length trained. A trial continues while it
    is among the best ``1 / divisor`` of all trials in the rung so far; no decision is revised. While trials are left,
    another trial follows each stopped or failed trial. As in Determined, nothing follows a trial that ends by itself.

    Unlike in Determined, a stopped trial is not ranked again after a failure or another validation, and gets no second
    follower. Otherwise more trials would run at once from then on.
    """

    def __init__(
        self, searcher: AdaptiveAshaSearcher | AsyncHalvingSearcher, bracket: Bracket, factory: TrialFactory
    ) -> None:
        self._searcher = searcher
        self._factory = factory
        self.bracket = bracket
        self.rungs = [Rung(length) for length in bracket.rungs]
        self._rung_of: dict[int, int] = {}
        self._decided: set[int] = set()
        self._retried: set[int] = set()
        self._invalid = 0

    def __contains__(self, trial_id: int) -> bool:
        return trial_id in self._rung_of

    def initial(self) -> list[Operation]:
        return [self._create() for _ in range(self.bracket.initial_trials)]

    def validation_completed(self, trial_id: int, metric: float | None, at: float | None) -> list[Operation]:
        if trial_id in self._decided:
            return []
        if metric is None or at is None or not math.isfinite(at):
            field, name = ("metric", self._searcher.metric) if metric is None else ("time_metric", self._searcher.clock)
            error = f"a validation must report {name!r}, which is the searcher's {field}, as a number"
            return [StopTrial(trial_id, error), *self._fail(trial_id)]
        operations: list[Operation] = []
        if math.isnan(metric):
            where = f"{int(at)} {self._searcher.clock}"
            operations.append(Warn(trial_id, f"{self._searcher.metric} is NaN at {where} and ranks last"))
        if not self._continues(trial_id, metric if self._searcher.smaller_is_better else -metric, int(at)):
            self._decided.add(trial_id)
            operations += [StopTrial(trial_id), *self._create_next(trial_id)]
        return operations

    def trial_exited(self, trial_id: int, reason: ExitReason) -> list[Operation]:
        if reason is ExitReason.INVALID_HP:
            return self._replace_invalid(trial_id)
        if reason is ExitReason.COMPLETED or trial_id in self._decided:
            return []
        return self._fail(trial_id)

    def trial_retried(self, trial_id: int) -> None:
        """Rank a failed trial by its next validations, unless it was stopped before; its follower exists already."""
        self._retried.add(trial_id)
        rung = self.rungs[self._rung_of[trial_id]]
        if (_FAILED, trial_id) in rung.metrics:
            rung.remove(trial_id)
            self._decided.discard(trial_id)

    def _continues(self, trial_id: int, metric: float, at: int) -> bool:
        """Insert the metric into all rungs up to the length trained; return False if a rung stops the trial."""
        for index in range(self._rung_of[trial_id], len(self.rungs)):
            rung = self.rungs[index]
            self._rung_of[trial_id] = index
            if at < rung.length:
                return True
            rank = rung.insert(trial_id, metric)
            if rank >= max(int(len(rung.metrics) / self._searcher.divisor), 1):
                return False
        return False

    def _fail(self, trial_id: int) -> list[Operation]:
        self._decided.add(trial_id)
        self.rungs[self._rung_of[trial_id]].insert(trial_id, _FAILED)
        return self._create_next(trial_id)

    def _replace_invalid(self, trial_id: int) -> list[Operation]:
        for rung in self.rungs:
            rung.remove(trial_id)
        self._invalid += 1
        if self._invalid <= most_replaced(self.bracket.max_trials):
            return [self._create()]
        return [Warn(trial_id, f"not replaced: {self._invalid - 1} trials before it had invalid hyperparameters")]

    def _create_next(self, after: int) -> list[Operation]:
        if after in self._retried or len(self._rung_of) - self._invalid >= self.bracket.max_trials:
            return []
        return [self._create()]

    def _create(self) -> CreateTrial:
        lengths = tuple(dict.fromkeys(self.bracket.rungs)) if self._searcher.validates_at_rungs else ()
        trial = self._factory.draw_trial(lengths)
        self._rung_of[trial.trial_id] = 0
        return trial
