"""A hyperparameter search: events of trials in, operations out.

Change here: choose a new search method by its name; its fields are in ``det_lightning/config/searchers.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from det_lightning.experiments.search.halving import HalvingSearch
from det_lightning.experiments.search.operations import (
    CreateTrial,
    ExitReason,
    Operation,
    Outcome,
    SearcherSettings,
    Shutdown,
    StopTrial,
    TrialFactory,
)
from det_lightning.experiments.search.sampling import SamplingSearch
from det_lightning.experiments.search.space import Grid

if TYPE_CHECKING:
    from det_lightning.experiments.search.space import SearchSpace

# A list of this many trials takes next to no time.
_MOST_PLANNED = 100_000


class Search:
    """Decides which trials to run and which to stop, as Determined 0.38.1 does.

    Call :meth:`initial` once, then report the events in order, and carry out the operations returned by each call. The
    results depend only on the events so far. An unusable seed is a ValueError, and so is an event of an unknown trial.
    """

    def __init__(self, settings: SearcherSettings, space: SearchSpace, experiment_seed: int) -> None:
        self.settings = settings
        self._factory = TrialFactory(space, experiment_seed)
        # The method sees only events of its own trials, and none after the exit of a trial.
        self._method = _make_method(self.settings, space, self._factory)
        self._exits: dict[int, ExitReason] = {}
        self._failed: set[int] = set()

    def initial(self) -> list[Operation]:
        return self._method.initial()

    def validation_completed(self, trial_id: int, metric: float | None, at: float | None) -> list[Operation]:
        """Return the operations that follow a validation.

        ``metric`` is None if missing or not a number; NaN ranks last. ``at`` is the time metric, None if missing;
        methods without a time metric ignore ``at``.
        """
        self._check_created(trial_id)
        if trial_id in self._exits:
            return []
        operations = self._method.validation_completed(trial_id, metric, at)
        self._failed.update(stop.trial_id for stop in operations if isinstance(stop, StopTrial) and stop.error)
        return operations

    def trial_exited(self, trial_id: int, reason: ExitReason) -> list[Operation]:
        """Return the operations after the end of a trial. Reporting an end twice changes nothing."""
        self._check_created(trial_id)
        if trial_id in self._exits:
            return []
        if trial_id in self._failed:
            reason = ExitReason.ERRORED
        self._exits[trial_id] = reason
        operations = self._method.trial_exited(trial_id, reason)
        if self.is_finished:
            operations.append(Shutdown(self._outcome()))
        return operations

    def trial_retried(self, trial_id: int) -> None:
        """Count a failed trial as training again; trials created because of its failure stay."""
        self._check_created(trial_id)
        self._exits.pop(trial_id, None)
        self._failed.discard(trial_id)
        self._method.trial_retried(trial_id)

    @property
    def is_finished(self) -> bool:
        """Whether all trials have ended and no more will be created."""
        return len(self._exits) == self._factory.created > 0

    def _check_created(self, trial_id: int) -> None:
        if not 1 <= trial_id <= self._factory.created:
            raise ValueError(f"trial {trial_id} was not created; so far there are {self._factory.created} trials.")

    def _outcome(self) -> Outcome:
        reasons = set(self._exits.values())
        if reasons == {ExitReason.ERRORED}:
            return Outcome.ERROR
        return Outcome.CANCELED if reasons == {ExitReason.CANCELED} else Outcome.COMPLETED


def plan_trials(settings: SearcherSettings, space: SearchSpace, experiment_seed: int) -> list[CreateTrial]:
    """Return the trials known before any result: all of single, random and grid, otherwise the initial trials.

    Raise a ValueError if there are too many to list.
    """
    search = Search(settings, space, experiment_seed)
    is_grid = search.settings.name == "grid"
    if (Grid(space).size if is_grid else search.settings.max_trials) > _MOST_PLANNED:
        raise ValueError(f"At most {_MOST_PLANNED:,} trials can be listed; the experiment has more.")
    planned = [operation for operation in search.initial() if isinstance(operation, CreateTrial)]
    for trial in planned:  # the list grows by followers
        followers = search.trial_exited(trial.trial_id, ExitReason.COMPLETED)
        planned += [operation for operation in followers if isinstance(operation, CreateTrial)]
    return planned


def _make_method(
    settings: SearcherSettings, space: SearchSpace, factory: TrialFactory
) -> SamplingSearch | HalvingSearch:
    at_once = settings.max_concurrent_trials
    if settings.name == "single":  # ends with the trial, even after invalid hyperparameters
        return SamplingSearch(factory, factory.draw_trial, max_trials=1, at_once=1)
    if settings.name == "random":
        return SamplingSearch(factory, factory.draw_trial, settings.max_trials, at_once, replace_invalid=True)
    if settings.name == "grid":
        grid = Grid(space)
        return SamplingSearch(factory, lambda: factory.create(grid.point(factory.created)), grid.size, at_once)
    return HalvingSearch(factory, settings)
