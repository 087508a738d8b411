"""The search methods that do not compare trials: single, random and grid."""

from __future__ import annotations

from det_lightning.experiments.search.creation import MOST_AT_ONCE, TrialFactory, most_replaced
from det_lightning.experiments.search.operations import ExitReason, Operation, Warn
from det_lightning.experiments.search.space import Grid


class RandomSearch:
    """Creates ``max_trials`` trials, a new one whenever one ends.

    With ``replace_invalid``, those with invalid hyperparameters do not count. A ``single`` search ends with one.
    """

    def __init__(self, factory: TrialFactory, max_trials: int, at_once: int, replace_invalid: bool) -> None:
        self._factory = factory
        self._max_trials = max_trials
        self._at_once = min(at_once or max_trials, MOST_AT_ONCE)
        self._replace_invalid = replace_invalid
        self._invalid = 0

    def initial(self) -> list[Operation]:
        return [self._factory.drawn() for _ in range(min(self._max_trials, self._at_once))]

    def validation_completed(self, trial_id: int, metric: float | None, at: float | None) -> list[Operation]:
        return []

    def trial_exited(self, trial_id: int, reason: ExitReason) -> list[Operation]:
        operations: list[Operation] = []
        if reason is ExitReason.INVALID_HP and self._replace_invalid:
            if self._invalid < most_replaced(self._max_trials):
                self._invalid += 1
            else:
                operations.append(
                    Warn(trial_id, f"not replaced: {self._invalid} trials before it had invalid hyperparameters")
                )
        if self._factory.created - self._invalid < self._max_trials:
            operations.append(self._factory.drawn())
        return operations


class GridSearch:
    """Creates one trial for each point of the grid, a new one whenever one ends, however it ends."""

    def __init__(self, factory: TrialFactory, grid: Grid, at_once: int) -> None:
        self._factory = factory
        self._grid = grid
        self._at_once = min(at_once or grid.size, MOST_AT_ONCE)

    def initial(self) -> list[Operation]:
        return [self._factory.with_hparams(self._grid.point(i)) for i in range(min(self._grid.size, self._at_once))]

    def validation_completed(self, trial_id: int, metric: float | None, at: float | None) -> list[Operation]:
        return []

    def trial_exited(self, trial_id: int, reason: ExitReason) -> list[Operation]:
        if self._factory.created == self._grid.size:
            return []
        return [self._factory.with_hparams(self._grid.point(self._factory.created))]
