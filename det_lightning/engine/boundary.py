"""The states of a boundary, and the actions that they take.

A workload ends where one or more boundaries are due. :class:`BoundaryActions` then passes through these phases until
training continues or is over::

    TRAINING -> DUE -> STOP_CHECK -> DUE -> ... -> TRAINING
                 |          |
                 |          +-> FINAL_CHECKPOINT -> STOPPED -> TRAINING
                 +-> FINAL_VALIDATION -> FINAL_CHECKPOINT -> STOPPED -> TRAINING

The caller of :meth:`BoundaryActions.next` performs each action before it asks for the next one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from det_lightning.checkpoint.format.content import TrialState
from det_lightning.engine.schedule import Boundary, Schedule


class Action(enum.Enum):
    """What to do at a boundary."""

    VALIDATE = "validate"
    CHECKPOINT = "checkpoint"
    STOP = "stop"


class Phase(enum.Enum):
    """The state of a run between two workloads."""

    TRAINING = "nothing is left to do at the boundary"
    DUE = "the boundaries that are due act, one after the other"
    STOP_CHECK = "a boundary has acted: does any rank want to stop?"
    FINAL_VALIDATION = "the length is reached: validate, unless just done"
    FINAL_CHECKPOINT = "the run ends: save, unless just done"
    STOPPED = "the run ends: stop the training loop"


class BoundaryActions:
    """The actions at the boundaries of one run, in Determined's order.

    A validation or checkpoint that ``state`` notes is not repeated. All ranks call ``stop_requested`` after each
    boundary.
    """

    def __init__(self, schedule: Schedule, state: TrialState, stop_requested: Callable[[], bool]) -> None:
        self.phase = Phase.TRAINING
        self._schedule = schedule
        self._state = state
        self._stop_requested = stop_requested
        self._due: list[Boundary] = []

    def begin(self, due: list[Boundary]) -> None:
        """Enter the boundaries that are due; none before the first workload, where a run may be complete already."""
        self._due = list(due)
        self.phase = Phase.DUE

    def next(self) -> Action | None:
        """Return the next action; None once training can continue."""
        while self.phase is not Phase.TRAINING:
            action = self._advance()
            if action is not None:
                return action
        return None

    def _advance(self) -> Action | None:
        """Enter the next phase; return the action that this takes, if any."""
        if self.phase is Phase.DUE:
            return self._act_on_due()
        if self.phase is Phase.STOP_CHECK:
            self.phase = Phase.FINAL_CHECKPOINT if self._stop_requested() else Phase.DUE
            return None
        if self.phase is Phase.FINAL_VALIDATION:
            self.phase = Phase.FINAL_CHECKPOINT
            return self._validate()
        if self.phase is Phase.FINAL_CHECKPOINT:
            self.phase = Phase.STOPPED
            return self._checkpoint()
        self.phase = Phase.TRAINING
        return Action.STOP

    def _act_on_due(self) -> Action | None:
        if not self._due:
            complete = self._schedule.is_complete(self._state)
            self.phase = Phase.FINAL_VALIDATION if complete else Phase.TRAINING
            return None
        self.phase = Phase.STOP_CHECK
        boundary = self._due.pop(0)
        if boundary is Boundary.VALIDATE:
            return self._validate()
        if boundary is Boundary.CHECKPOINT:
            return self._checkpoint()
        return None

    def _validate(self) -> Action | None:
        return None if self._state.last_val == self._state.batches_trained else Action.VALIDATE

    def _checkpoint(self) -> Action | None:
        return None if self._state.last_ckpt == self._state.batches_trained else Action.CHECKPOINT
