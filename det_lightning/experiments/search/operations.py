"""What a search gets and asks for: settings, the exits of trials, operations, and trials to create."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from det_lightning.experiments.search.generator import Generator
from det_lightning.experiments.search.space import draw
from det_lightning.hyperparameters import convert_like_master

if TYPE_CHECKING:
    from det_lightning.experiments.search.space import SearchSpace


class ExitReason(str, enum.Enum):
    """Why a trial ended for good, with no restarts left or needed."""

    COMPLETED = "completed"
    ERRORED = "errored"
    CANCELED = "canceled"
    INVALID_HP = "invalid_hp"


class Outcome(str, enum.Enum):
    """The end of an experiment, in Determined's terms for states."""

    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    CANCELED = "CANCELED"


@dataclass(frozen=True)
class CreateTrial:
    """Run a new trial."""

    trial_id: int  # 1 for the first trial of the search, then 2, 3, ...
    trial_seed: int  # below 2**31
    hparams: dict[str, Any]  # one value for each hyperparameter, nested like the search space
    # Ascending lengths, in the unit of the settings' time_metric, of validations in addition to the trial's own.
    validate_at: tuple[int, ...] = ()


@dataclass(frozen=True)
class StopTrial:
    """End a trial; requested at most once. The trial checkpoints and exits, and the exit is reported as usual."""

    trial_id: int
    error: str | None = None  # why the trial counts as failed; None if no longer needed


@dataclass(frozen=True)
class Warn:
    """Show a message. As a part of the answers to events, a replay repeats the message."""

    trial_id: int
    message: str


@dataclass(frozen=True)
class Shutdown:
    """The search is over: all trials have ended, and no other will be created."""

    outcome: Outcome


Operation = CreateTrial | StopTrial | Warn | Shutdown


@dataclass(frozen=True)
class SearcherSettings:
    """The ``searcher`` section of an experiment configuration, with Determined's defaults.

    A 0 or an empty string stands for a missing value.
    """

    name: str
    metric: str
    smaller_is_better: bool = True
    max_trials: int = 0
    max_concurrent_trials: int = 16  # 0 means no limit
    max_time: int = 0  # how long the halving methods let a trial train,
    time_metric: str = ""  # measured by a metric of each validation, such as "batches" or "epochs"
    mode: str = "standard"
    divisor: float = 4.0
    max_rungs: int = 5
    bracket_rungs: tuple[int, ...] = ()  # the number of rungs of each bracket, instead of the mode's
    num_rungs: int = 0  # of the only bracket of async_halving
    # Trials of the halving methods validate at the lengths of the rungs; otherwise a trial that validates only at its
    # end is never stopped early.
    force_validations: bool = False


#: The most trials to create at once, whatever a search allows. Trials created later are the same.
MOST_AT_ONCE = 100_000


class TrialFactory:
    """Creates the trials of a search from one generator: trial k is the same whenever created."""

    def __init__(self, space: SearchSpace, experiment_seed: int) -> None:
        self._space = space
        self._generator = Generator(experiment_seed)
        self.created = 0

    def draw_trial(self, validate_at: tuple[int, ...] = ()) -> CreateTrial:
        return self.create(draw(self._space, self._generator), validate_at)

    def create(self, hparams: dict[str, Any], validate_at: tuple[int, ...] = ()) -> CreateTrial:
        for _ in range(4):
            self._generator.word()  # Determined draws 16 bytes for the id of a request
        self.created += 1
        return CreateTrial(self.created, self._generator.below(2**31), convert_like_master(hparams), validate_at)


def most_replaced(max_trials: int) -> int:
    """Return how many trials with invalid hyperparameters are replaced, so that a hopeless search ends."""
    return max(100, 10 * max_trials)
