"""A search over a simulated clock: its trials report in any order, fail, and are stopped late."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from det_lightning.experiments.search.operations import CreateTrial, ExitReason, Operation, Shutdown, StopTrial, Warn
from det_lightning.experiments.search.search import Search

#: A validation (trial, metric, time), an exit (trial, reason) or a retry (trial,), as a runner would log it.
Event = tuple[int, float, int] | tuple[int, ExitReason] | tuple[int]


def report(search: Search, event: Event) -> list[Operation]:
    if len(event) == 1:
        search.trial_retried(*event)
        return []
    if len(event) == 2:
        return search.trial_exited(*event)
    return search.validation_completed(*event)


@dataclass
class Chances:
    """How likely a trial is to do something else than the next validation, at each of its turns."""

    error: float = 0.0
    invalid: float = 0.0
    nan: float = 0.0
    ignore_stop: float = 0.0
    retry: float = 0.0  # the first of the failed trials


@dataclass
class Simulation:
    """Runs all trials to their end, ``slots`` of them at once, and logs events and the answers to them."""

    search: Search
    chance: random.Random
    chances: Chances
    max_time: int
    slots: int = 1000
    events: list[Event] = field(default_factory=list)
    answers: list[list[Operation]] = field(default_factory=list)
    most_undecided: int = 0

    def run(self) -> None:
        self._waiting: list[int] = []
        self._time: dict[int, int] = {}
        self._stopped: set[int] = set()
        self._failed: list[int] = []
        self._take(self.search.initial())
        while self._time or self._waiting or (self._failed and self.chances.retry):
            if self._failed and self.chance.random() < self.chances.retry:
                self._retry(self._failed.pop(0))
            while self._waiting and len(self._time) < self.slots:
                self._time[self._waiting.pop(0)] = 0
            if not self._time:
                continue
            trial_id = self.chance.choice(sorted(self._time))
            event = self._turn(trial_id)
            if len(event) == 2:
                del self._time[trial_id]
                self._failed += [trial_id] if event[1] is ExitReason.ERRORED else []
            self.events.append(event)
            self._take(report(self.search, event))

    def operations(self) -> list[Operation]:
        return [operation for answer in self.answers for operation in answer]

    def created(self) -> list[CreateTrial]:
        return [operation for operation in self.operations() if isinstance(operation, CreateTrial)]

    def stopped(self) -> list[int]:
        return [operation.trial_id for operation in self.operations() if isinstance(operation, StopTrial)]

    def not_replaced(self) -> list[int]:
        """Return the trials with invalid hyperparameters beyond the limit for replacements."""
        return [
            operation.trial_id
            for operation in self.operations()
            if isinstance(operation, Warn) and "not replaced" in operation.message
        ]

    def exits(self) -> dict[int, ExitReason]:
        return {event[0]: event[1] for event in self.events if len(event) == 2}

    def shutdowns(self) -> list[Shutdown]:
        return [operation for operation in self.operations() if isinstance(operation, Shutdown)]

    def _retry(self, trial_id: int) -> None:
        self._time[trial_id] = 0
        self.events.append((trial_id,))
        self.answers.append(report(self.search, (trial_id,)))

    def _take(self, operations: list[Operation]) -> None:
        self.answers.append(operations)
        for operation in operations:
            if isinstance(operation, CreateTrial):
                self._waiting.append(operation.trial_id)
            elif isinstance(operation, StopTrial):
                self._stopped.add(operation.trial_id)
        undecided = (set(self._time) | set(self._waiting)) - self._stopped
        self.most_undecided = max(self.most_undecided, len(undecided))

    def _turn(self, trial_id: int) -> Event:
        drawn = self.chance.random()
        if trial_id in self._stopped and drawn >= self.chances.ignore_stop:
            return (trial_id, ExitReason.COMPLETED)
        if drawn < self.chances.error:
            return (trial_id, ExitReason.ERRORED)
        if drawn < self.chances.error + self.chances.invalid and trial_id not in self._stopped:
            return (trial_id, ExitReason.INVALID_HP)
        if self._time[trial_id] >= self.max_time:
            return (trial_id, ExitReason.COMPLETED)
        self._time[trial_id] = min(self._time[trial_id] + self.chance.randint(1, 4), self.max_time)
        metric = math.nan if self.chance.random() < self.chances.nan else self.chance.randint(0, 8) / 4
        return (trial_id, metric, self._time[trial_id])
