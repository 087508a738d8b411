"""When to report, validate, checkpoint and stop, and in which order. Imports neither Lightning nor torch.

Change here: when something is due. Default periods are in ``det_lightning/pytorch/_trainer.py`` and, for a
configuration, in ``det_lightning/config/training.py``.
"""

from __future__ import annotations

import enum
import itertools
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from typing import cast

from det_lightning.checkpoint.format.content import TrialState
from det_lightning.units import Batch, Epoch, TrainUnit


class Due(enum.IntEnum):
    """The possible work at a boundary, in order."""

    TRAIN = 0
    VALIDATE = 1
    CHECKPOINT = 2
    REPORT = 3


class Schedule:
    """The length and the periods of a run. None means never, and each of several validation periods counts.

    Without ``max_length`` something else ends the run, with no final validation or checkpoint. ``test_mode`` trains on
    at most as many batches; True is one.
    """

    def __init__(
        self,
        max_length: TrainUnit | None = None,
        validation_period: TrainUnit | Sequence[TrainUnit] | None = None,
        checkpoint_period: TrainUnit | None = None,
        reporting_period: TrainUnit | None = None,
        test_mode: int = False,
    ) -> None:
        validations = validation_period if isinstance(validation_period, Sequence) else [validation_period]
        units = [
            (Due.TRAIN, "max_length", max_length),
            *((Due.VALIDATE, "validation_period", unit) for unit in validations),
            (Due.CHECKPOINT, "checkpoint_period", checkpoint_period),
            (Due.REPORT, "reporting_period", reporting_period),
        ]
        _require_units([(name, unit) for _, name, unit in units])
        self.max_length = max_length
        self._length = None if max_length is None else cast("int", max_length.value)
        self.validation_period = validation_period
        self.reporting_period = reporting_period
        self.test_mode = test_mode
        self._periods = [(name, unit) for boundary, name, unit in units if boundary is not Due.TRAIN]
        # A period beyond any run need not be checked after each batch.
        due = [(boundary, unit) for boundary, _, unit in units if unit is not None and not _is_never(unit)]
        self._batch_units = [(boundary, unit) for boundary, unit in due if isinstance(unit, Batch)]
        self._epoch_units = [(boundary, unit) for boundary, unit in due if isinstance(unit, Epoch)]
        self.validates = any(boundary is Due.VALIDATE for boundary, _ in due)

    def due(self, batches_trained: int, epoch_len: int) -> list[Due]:
        """Return the work due right after batch number ``batches_trained`` (counted from 1), in order."""
        due = [boundary for boundary, unit in self._batch_units if unit.should_stop(batches_trained)]
        epochs, into_epoch = divmod(batches_trained, epoch_len)
        if not into_epoch:
            due += [boundary for boundary, unit in self._epoch_units if unit.should_stop(epochs)]
        if 0 < self.test_mode <= batches_trained and Due.TRAIN not in due:
            due.append(Due.TRAIN)
        return sorted(set(due)) if due else due

    def next_batch_to_look(self, batches_trained: int, epoch_len: int) -> int:
        """Return the next number of batches at which anything may be due; :meth:`due` is empty until then."""
        if self.test_mode:
            return batches_trained + 1
        epochs = batches_trained // epoch_len
        nearest = [_next_multiple(batches_trained, unit) for _, unit in self._batch_units]
        nearest += [_next_multiple(epochs, unit) * epoch_len for _, unit in self._epoch_units]
        return min(nearest, default=sys.maxsize)

    def find_periods_below_one(self) -> list[str]:
        """Return the periods below one, as ``name=unit``: such a period is due at every batch or epoch."""
        return [
            f"{name}={unit}"
            for name, unit in self._periods
            if unit is not None and isinstance(unit.value, int) and unit.value < 1
        ]

    def count_epochs(self, state: TrialState, epoch_len: int) -> int | None:
        """Return the number of epochs at the end, the last perhaps incomplete; None without ``max_length``."""
        if self._length is None or isinstance(self.max_length, Epoch):
            return self._length
        # Earlier runs of the trial may have had epochs of another length.
        left = self._length - state.batches_trained + state.batches_trained % epoch_len
        return state.epochs_trained + -(-left // epoch_len)

    def is_complete(self, state: TrialState) -> bool:
        """Return whether training has reached the length."""
        if self.test_mode and state.batches_trained >= self.test_mode:
            return True
        trained = state.batches_trained if isinstance(self.max_length, Batch) else state.epochs_trained
        return self._length is not None and trained >= self._length

    def progress(self, state: TrialState, epoch_len: int) -> float | None:
        """Return the trained fraction of the length, from 0 to 1; None if there is no length."""
        if self._length is None:
            return None
        length = self._length * (1 if isinstance(self.max_length, Batch) else epoch_len)
        return min(state.batches_trained / length, 1.0) if length > 0 else 1.0


def _is_never(unit: TrainUnit) -> bool:
    return isinstance(unit.value, int) and unit.value == sys.maxsize


def _next_multiple(steps: int, unit: TrainUnit) -> int:
    """Return the next count at which ``unit`` may be due; for a container, the next count."""
    period = unit.value if isinstance(unit.value, int) else 1
    return steps + 1 if period < 1 else (steps // period + 1) * period


def _require_units(units: list[tuple[str, TrainUnit | None]]) -> None:
    mistakes = [
        f"{name} must be a Batch or an Epoch, such as Batch(100); got {unit!r} of type {type(unit).__name__}"
        for name, unit in units
        if unit is not None and not isinstance(unit, Batch | Epoch)
    ]
    mistakes += [
        f"{name} must count in whole numbers or be a container of whole numbers, such as Batch([5, 30]); got {unit!r}"
        for name, unit in units
        if isinstance(unit, Batch | Epoch)
        and (isinstance(unit.value, str) or not isinstance(unit.value, int | Container))
    ]
    length = dict(units)["max_length"]
    if isinstance(length, Batch | Epoch) and isinstance(length.value, Container):
        mistakes.append(f"max_length must be Batch(int) or Epoch(int); got {length!r}")
    if mistakes:
        raise TypeError("; ".join(mistakes) + ".")
    if isinstance(length, Batch | Epoch) and isinstance(length.value, int) and length.value < 0:
        raise ValueError(f"max_length must not be negative; got {length!r}. Pass the length of the whole training.")


class Action(enum.Enum):
    """An action at a boundary."""

    VALIDATE = "validate"
    CHECKPOINT = "checkpoint"
    STOP = "stop"


class BoundaryActions:
    """The actions at the boundaries of one run, in Determined's order.

    The caller of :meth:`next` performs each action before asking for the next. A validation or checkpoint recorded in
    ``state`` is not repeated. All ranks call ``stop_requested`` after each boundary.
    """

    def __init__(self, schedule: Schedule, state: TrialState, stop_requested: Callable[[], bool]) -> None:
        self._schedule = schedule
        self._state = state
        self._stop_requested = stop_requested
        self._actions: Iterator[Action] = iter(())

    def begin(self, due: list[Due]) -> None:
        """Enter a boundary; ``due`` is empty before the first workload, when a run may already be complete."""
        self._actions = self._follow(due)

    def next(self) -> Action | None:
        """Return the next action; None once training can continue."""
        return next(self._actions, None)

    def continue_after_report(self) -> bool:
        """Return whether training continues at a boundary with nothing but a report; :meth:`next` acts otherwise."""
        action = self.next()
        if action is not None:
            self._actions = itertools.chain([action], self._actions)
        return action is None

    def _follow(self, due: list[Due]) -> Iterator[Action]:
        for boundary in due:
            if boundary is Due.VALIDATE:
                yield from self._validate()
            if boundary is Due.CHECKPOINT:
                yield from self._save()
            if self._stop_requested():
                break
        else:
            if not self._schedule.is_complete(self._state):
                return
            yield from self._validate()
        yield from self._save()
        yield Action.STOP

    def _validate(self) -> Iterator[Action]:
        if self._state.last_val != self._state.batches_trained:
            yield Action.VALIDATE

    def _save(self) -> Iterator[Action]:
        if self._state.last_ckpt != self._state.batches_trained:
            yield Action.CHECKPOINT
