"""A hyperparameter search: events of trials in, operations out.

Change here: choose a new search method, a module beside this file, by its name. The model of its fields is in
``det_lightning/config/searchers.py``, and their effects are in ``det_lightning/config/effects.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from det_lightning.experiments.search.halving import HalvingBracket, make_brackets
from det_lightning.experiments.search.operations import (
    MOST_AT_ONCE,
    CreateTrial,
    ExitReason,
    Operation,
    Shutdown,
    StopTrial,
    TrialFactory,
    Warn,
    most_replaced,
)
from det_lightning.experiments.search.space import Grid

if TYPE_CHECKING:
    from det_lightning.config.searchers import Searcher
    from det_lightning.experiments.search.space import SearchSpace


class Search:
    """Decides which trials to run and which to stop, as Determined 0.38.1 does.

    Call :meth:`initial` once, then report the events in order, and carry out the operations returned by each call. The
    results depend only on the events so far. An unusable seed and an event of an unknown trial raise a ValueError.
    """

    def __init__(self, searcher: Searcher, space: SearchSpace, experiment_seed: int) -> None:
        self.searcher = searcher
        self._factory = TrialFactory(space, experiment_seed)
        # A method sees only events of its own trials, and none after the exit of a trial.
        self._methods = _make_methods(searcher, space, self._factory)
        self._exits: dict[int, ExitReason] = {}
        self._failed: set[int] = set()

    def initial(self) -> list[Operation]:
        return [operation for method in self._methods for operation in method.initial()]

    def validation_completed(self, trial_id: int, metric: float | None, at: float | None) -> list[Operation]:
        """Return the operations that follow a validation.

        ``metric`` is None if missing or not a number; NaN ranks last. ``at`` is the time metric, None if missing;
        methods without a time metric ignore ``at``.
        """
        method = self._find_method(trial_id)
        if trial_id in self._exits:
            return []
        operations = method.validation_completed(trial_id, metric, at)
        self._failed.update(stop.trial_id for stop in operations if isinstance(stop, StopTrial) and stop.error)
        return operations

    def trial_exited(self, trial_id: int, reason: ExitReason) -> list[Operation]:
        """Return the operations after the end of a trial. Reporting an end twice changes nothing."""
        method = self._find_method(trial_id)
        if trial_id in self._exits:
            return []
        if trial_id in self._failed:
            reason = ExitReason.ERRORED
        self._exits[trial_id] = reason
        operations = method.trial_exited(trial_id, reason)
        if self.is_finished:
            reasons = set(self._exits.values())
            all_failed = reasons in ({ExitReason.ERRORED}, {ExitReason.CANCELED})
            operations.append(Shutdown(reason if all_failed else ExitReason.COMPLETED))
        return operations

    def trial_retried(self, trial_id: int) -> None:
        """Let a failed trial train again; trials created because of its failure stay."""
        self._find_method(trial_id).trial_retried(trial_id)
        self._exits.pop(trial_id, None)
        self._failed.discard(trial_id)

    @property
    def is_finished(self) -> bool:
        """Whether all trials have ended and no more will be created."""
        return len(self._exits) == self._factory.created > 0

    def _find_method(self, trial_id: int) -> SamplingSearch | HalvingBracket:
        if not 1 <= trial_id <= self._factory.created:
            raise ValueError(f"trial {trial_id} was not created; so far there are {self._factory.created} trials.")
        return next(method for method in self._methods if trial_id in method)


class SamplingSearch:
    """Creates ``max_trials`` trials, another one whenever one ends for any reason.

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

    def __contains__(self, trial_id: int) -> bool:
        return True

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


#: How many trials a plan lists at most.
MOST_PLANNED = 10_000


def plan_trials(searcher: Searcher, space: SearchSpace, experiment_seed: int) -> list[CreateTrial]:
    """Return the first trials known before any result: of single, random and grid, otherwise the initial trials."""
    search = Search(searcher, space, experiment_seed)
    planned = [operation for operation in search.initial() if isinstance(operation, CreateTrial)]
    for trial in planned:  # the list grows by followers
        if len(planned) >= MOST_PLANNED:
            break
        followers = search.trial_exited(trial.trial_id, ExitReason.COMPLETED)
        planned += [operation for operation in followers if isinstance(operation, CreateTrial)]
    return planned


def _make_methods(
    searcher: Searcher, space: SearchSpace, factory: TrialFactory
) -> Sequence[SamplingSearch | HalvingBracket]:
    if searcher.name == "single":  # ends with the trial, even after invalid hyperparameters
        return [SamplingSearch(factory, factory.draw_trial, max_trials=1, at_once=1)]
    at_once = searcher.max_concurrent_trials
    if searcher.name == "random":
        return [SamplingSearch(factory, factory.draw_trial, searcher.max_trials, at_once, replace_invalid=True)]
    if searcher.name == "grid":
        grid = Grid(space)
        return [SamplingSearch(factory, lambda: factory.create(grid.point(factory.created)), grid.size, at_once)]
    return [HalvingBracket(searcher, bracket, factory) for bracket in make_brackets(searcher)]
