"""The search methods without comparisons of trials: single, random and grid."""

from __future__ import annotations

from collections.abc import Callable

from det_lightning.experiments.search.operations import (
    MOST_AT_ONCE,
    CreateTrial,
    ExitReason,
    Operation,
    TrialFactory,
    Warn,
    most_replaced,
)


class SamplingSearch:
    """Creates ``max_trials`` trials, a new trial after each end, whatever the reason.

    With ``replace_invalid``, trials with invalid hyperparameters do not count.
    """

    def __init__(
        self,
        factory: TrialFactory,
        create: Callable[[], CreateTrial],
        max_trials: int,
        at_once: int,
        replace_invalid: bool = False,
    ) -> None:
        self._factory = factory
        self._create = create
        self._max_trials = max_trials
        self._at_once = min(at_once or max_trials, MOST_AT_ONCE)
        self._replace_invalid = replace_invalid
        self._invalid = 0
        self._retried: set[int] = set()

    def initial(self) -> list[Operation]:
        return [self._create() for _ in range(min(self._max_trials, self._at_once))]

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
        has_follower = trial_id in self._retried and reason is not ExitReason.INVALID_HP
        if self._factory.created - self._invalid < self._max_trials and not has_follower:
            operations.append(self._create())
        return operations

    def trial_retried(self, trial_id: int) -> None:
        self._retried.add(trial_id)
