"""When to report, validate, checkpoint and stop. Plain Python: imports neither Lightning nor torch."""

from __future__ import annotations

import enum
import sys
from collections.abc import Container

from det_lightning.checkpoint.format.content import TrialState
from det_lightning.units import Batch, Epoch, TrainUnit


class Boundary(enum.IntEnum):
    """A reason to end a workload, in the order in which several at once are acted on."""

    TRAIN = 0
    VALIDATE = 1
    CHECKPOINT = 2
    REPORT = 3


class Schedule:
    """The length and the periods of a run; None for never.

    Without ``max_length`` something else ends the run, without a final validation or checkpoint. ``test_mode`` trains
    on a single batch.
    """

    def __init__(
        self,
        max_length: TrainUnit | None = None,
        validation_period: TrainUnit | None = None,
        checkpoint_period: TrainUnit | None = None,
        reporting_period: TrainUnit | None = None,
        test_mode: bool = False,
    ) -> None:
        units = {
            Boundary.TRAIN: ("max_length", max_length),
            Boundary.VALIDATE: ("validation_period", validation_period),
            Boundary.CHECKPOINT: ("checkpoint_period", checkpoint_period),
            Boundary.REPORT: ("reporting_period", reporting_period),
        }
        _require_units(dict(units.values()))
        self.max_length = max_length
        self.test_mode = test_mode
        # A period that no run reaches need not be looked at after each batch.
        due = [(boundary, u) for boundary, (_, u) in units.items() if u is not None and u.value != sys.maxsize]
        self._batch_units = [(boundary, unit) for boundary, unit in due if isinstance(unit, Batch)]
        self._epoch_units = [(boundary, unit) for boundary, unit in due if isinstance(unit, Epoch)]

    def due(self, batches_trained: int, epoch_len: int) -> list[Boundary]:
        """Return the boundaries that lie right after batch number ``batches_trained`` (counted from 1), in order."""
        due = [boundary for boundary, unit in self._batch_units if unit.should_stop(batches_trained)]
        epochs, into_epoch = divmod(batches_trained, epoch_len)
        if not into_epoch:
            due += [boundary for boundary, unit in self._epoch_units if unit.should_stop(epochs)]
        if self.test_mode and Boundary.TRAIN not in due:
            due.append(Boundary.TRAIN)
        return sorted(due) if due else due

    def next_batch_to_look(self, batches_trained: int, epoch_len: int) -> int:
        """Return the next number of batches at which a boundary may lie; before that :meth:`due` is empty."""
        if self.test_mode:
            return batches_trained + 1
        epochs = batches_trained // epoch_len
        nearest = [_next_multiple(batches_trained, unit) for _, unit in self._batch_units]
        nearest += [_next_multiple(epochs, unit) * epoch_len for _, unit in self._epoch_units]
        return min(nearest, default=sys.maxsize)

    def is_complete(self, state: TrialState) -> bool:
        """Return whether training has reached its length."""
        if self.test_mode:
            return state.batches_trained >= 1
        if self.max_length is None or not isinstance(self.max_length.value, int):
            return False
        trained = state.batches_trained if isinstance(self.max_length, Batch) else state.epochs_trained
        return trained >= self.max_length.value


def _next_multiple(steps: int, unit: TrainUnit) -> int:
    """Return the next step that ``unit`` may name: any, if it is a container."""
    period = unit.value if isinstance(unit.value, int) else 1
    return steps + 1 if period < 1 else (steps // period + 1) * period


def _require_units(units: dict[str, TrainUnit | None]) -> None:
    mistakes = [
        f"{name} must be a Batch or an Epoch, such as Batch(100); got {unit!r} of type {type(unit).__name__}"
        for name, unit in units.items()
        if unit is not None and not isinstance(unit, Batch | Epoch)
    ]
    mistakes += [
        f"{name} must count in whole numbers or be a container of them; got {unit!r}"
        for name, unit in units.items()
        if isinstance(unit, Batch | Epoch) and not isinstance(unit.value, int | Container)
    ]
    length = units["max_length"]
    if isinstance(length, Batch | Epoch) and isinstance(length.value, Container):
        mistakes.append(f"max_length must be Batch(int) or Epoch(int); got {length!r}")
    if mistakes:
        raise TypeError("; ".join(mistakes) + ".")
