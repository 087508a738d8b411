"""The messages between a search and its runner: exits of trials go in, operations and trials to create come out."""

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
    """Why a trial ended for good. The first three are also ends of experiments.

    The values are Determined's names of states, where it has one.
    """

    COMPLETED = "COMPLETED"
    ERRORED = "ERROR"
    CANCELED = "CANCELED"
    INVALID_HP = "INVALID_HP"


@dataclass(frozen=True)
class CreateTrial:
    """Run a new trial."""

    trial_id: int  # 1 for the first trial of the search, then 2, 3, ...
    trial_seed: int  # below 2**31
    hparams: dict[str, Any]  # one value for each hyperparameter, nested like the search space
    # Ascending lengths, in the unit of the searcher's clock, of validations in addition to the trial's own.
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

    outcome: ExitReason


Operation = CreateTrial | StopTrial | Warn | Shutdown


#: The most trials to create at once, whatever a search allows. Trials created later are the same.
MOST_AT_ONCE = 100_000


class TrialFactory:
    """Creates the trials of a search from one generator: trial k is the same whenever it is created."""

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
    """Return how many trials with invalid hyperparameters are replaced at most, so that a hopeless search ends."""
    return max(100, 10 * max_trials)
