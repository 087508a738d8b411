"""How a trial is run, and where the boundaries of a run lie."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from det_lightning.testing.records.record import RunSettings


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """How a trial is run; numbers are batches.

    Attributes:
        validate_after: where to validate besides at the end; None for the period of the settings.
        around: makes a context manager to train in.
    """

    name: str  # of the run, for messages
    settings: RunSettings  # what it depends on
    storage: Path  # directory for checkpoints
    validate_after: frozenset[int] | None = None
    checkpoint_after: frozenset[int] = frozenset()  # where to write checkpoints besides at the end
    epoch_limit: int | None = None  # the longest epoch; None for all of it
    validation_batches: int | None = None  # the longest validation; None for all of it
    resume_from: Path | str | None = None  # the checkpoint to go on from
    trusted: bool = False  # read it even if that runs code
    distributed: Any = None  # the processes of the run
    threads: int | None = None  # torch's number of threads, by default as it is
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def limits(self) -> dict[str, Any]:
        """Return the flags of ``pl.Trainer`` for it."""
        limits = {"limit_train_batches": self.epoch_limit, "limit_val_batches": self.validation_batches}
        return {name: limit for name, limit in limits.items() if limit is not None}


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """The boundaries of a run, so that a few batches have one of every kind; None for one that the data do not have."""

    batches: int  # length of the run
    epoch_limit: int | None  # what epochs are cut to; None if they are short enough, or do not end
    mid_epoch: int | None  # a checkpoint between two batches of an epoch, with nothing else
    epoch_end: int | None  # a checkpoint at the end of an epoch
    after_validation: int  # a checkpoint right after a validation

    @classmethod
    def of(cls, batches: int, epoch_length: int | None) -> Boundaries:
        """Lay out a run of at least 6 batches; ``epoch_length`` is that of the training loader, if it has one."""
        longest = max(2, (batches - 2) // 2)
        if epoch_length is None:
            return cls(batches, None, 2, None, longest)
        epoch = min(epoch_length, longest)
        mid = None if epoch == 1 else epoch // 2
        return cls(batches, longest if epoch_length > longest else None, mid, epoch, epoch + max(1, epoch // 2 - 1) + 1)

    def applied_to(self, plan: RunPlan) -> RunPlan:
        """Return the plan with these boundaries, and a checkpoint within an aggregation if there is one."""
        within = self.mid_aggregation(plan.settings.aggregation_frequency)
        checkpoints = (self.mid_epoch, self.epoch_end, self.after_validation, within)
        return dataclasses.replace(
            plan,
            validate_after=frozenset({self.after_validation}),
            checkpoint_after=frozenset(batch for batch in checkpoints if batch is not None),
            epoch_limit=self.epoch_limit,
            validation_batches=4,
        )

    def mid_aggregation(self, frequency: int) -> int | None:
        """Return a number of batches that does not close an update of ``frequency`` batches."""
        if frequency == 1:
            return None
        return frequency + 1 if frequency + 1 < self.batches else 1
