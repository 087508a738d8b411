"""What a search asks of the runner of its trials, and what it learns from the runner."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class ExitReason(str, enum.Enum):
    """Why a trial ended for good, with no restarts left or needed."""

    COMPLETED = "completed"
    ERRORED = "errored"
    CANCELED = "canceled"
    INVALID_HP = "invalid_hp"


class Outcome(str, enum.Enum):
    """How an experiment ended, in Determined's terms for its states."""

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
    """End a trial; requested at most once. It checkpoints and exits, and its exit is then reported like any other."""

    trial_id: int
    error: str | None = None  # why the trial counts as failed; None if the search does not need it any longer


@dataclass(frozen=True)
class Warn:
    """Show a message. It is part of the answers to events, so a replay repeats it."""

    trial_id: int
    message: str


@dataclass(frozen=True)
class Shutdown:
    """The search is over: all trials have ended, and no other will be created."""

    outcome: Outcome


Operation = CreateTrial | StopTrial | Warn | Shutdown
