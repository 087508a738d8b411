"""How the halving methods divide trials among brackets, and the lengths of the rungs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from det_lightning.experiments.search.creation import MOST_AT_ONCE
from det_lightning.experiments.search.settings import SearcherSettings


@dataclass(frozen=True)
class Bracket:
    """Trials that are compared with each other."""

    rungs: tuple[int, ...]  # the lengths at which they are compared, ascending
    max_trials: int  # not counting those with invalid hyperparameters
    initial_trials: int  # those created at the start; each further one follows a stopped or failed one


def brackets_of(settings: SearcherSettings) -> list[Bracket]:
    """Return the brackets of a halving search, the one with the most rungs first."""
    if settings.name == "async_halving":
        counts = [settings.num_rungs]
        trials = [settings.max_trials]
        concurrent = [settings.max_concurrent_trials or int(settings.divisor ** (settings.num_rungs - 1))]
    else:
        counts = sorted(settings.bracket_rungs or _rungs_of_mode(settings), reverse=True)
        trials = _divide_trials(settings.max_trials, settings.divisor, counts)
        concurrent = _divide_concurrency(settings.max_concurrent_trials, settings.divisor, trials)
    return [
        Bracket(
            _rung_lengths(num_rungs, settings.divisor, settings.max_time),
            max_trials,
            min(at_once, max_trials, MOST_AT_ONCE),
        )
        for num_rungs, max_trials, at_once in zip(counts, trials, concurrent, strict=True)
    ]


def _rung_lengths(num_rungs: int, divisor: float, max_time: int) -> tuple[int, ...]:
    return tuple(max(int(max_time / divisor ** (num_rungs - 1 - rung)), 1) for rung in range(num_rungs))


def _rungs_of_mode(settings: SearcherSettings) -> range:
    # In floats, like Determined: for 3**5 and 3, or 10**3 and 10, the result is one less than the exact one.
    of_time = int(math.log(settings.max_time) / math.log(settings.divisor)) + 1
    of_trials = int(math.log(settings.max_trials) / math.log(settings.divisor)) + 1
    most = min(settings.max_rungs, of_time, of_trials)
    least = {"aggressive": most, "standard": (most - 1) // 2 + 1, "conservative": 1}[settings.mode]
    return range(least, most + 1)


def _divide_trials(max_trials: int, divisor: float, counts: list[int]) -> list[int]:
    """Divide the trials so that all brackets train for about as long; the total may be more than asked for."""
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
