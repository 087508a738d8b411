"""The stop rule once more, as short as it can be written: by counting who was better."""

from __future__ import annotations

import math

from det_lightning.experiments.search.halving import Bracket


class Oracle:
    """Knows for each validation whether it stops its trial, where no trial fails."""

    def __init__(self, brackets: list[Bracket], divisor: float, smaller_is_better: bool) -> None:
        self._divisor = divisor
        self._sign = 1 if smaller_is_better else -1
        self._brackets = brackets
        self._bracket_of: dict[int, int] = {}
        self._passed: dict[int, int] = {}
        self._stopped: set[int] = set()
        self.seen: list[list[list[float]]] = [[[] for _ in bracket.rungs] for bracket in brackets]
        trial_id = 0
        for index, bracket in enumerate(brackets):
            for _ in range(bracket.initial_trials):
                trial_id += 1
                self._bracket_of[trial_id] = index

    def follow(self, stopped: int, follower: int) -> None:
        self._bracket_of[follower] = self._bracket_of[stopped]

    def stops(self, trial_id: int, metric: float, at: int) -> bool:
        bracket = self._bracket_of[trial_id]
        lengths = self._brackets[bracket].rungs
        while trial_id not in self._stopped:
            rung = self._passed.get(trial_id, 0)
            if at < lengths[rung]:
                return False
            earlier = self.seen[bracket][rung]
            value = math.inf if math.isnan(metric) else self._sign * metric
            better = len(earlier) if math.isnan(metric) else sum(other < value for other in earlier)
            earlier.append(value)
            if rung == len(lengths) - 1 or better >= max(len(earlier) // self._divisor, 1):
                self._stopped.add(trial_id)
                return True
            self._passed[trial_id] = rung + 1
        return False
