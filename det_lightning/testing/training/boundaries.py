"""Where the boundaries of a run lie, so that a few batches have one of every kind."""

from __future__ import annotations

import dataclasses

from det_lightning.testing.training.execution import RunPlan


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """The boundaries of a run, in batches trained; None for a kind that this trial's data do not have.

    Attributes:
        batches: length of the run.
        epoch_limit: what epochs are cut to; None if they are short enough, or do not end.
        mid_epoch: a checkpoint between two batches of an epoch, with nothing else.
        epoch_end: a checkpoint at the end of an epoch.
        after_validation: a checkpoint right after a validation.
    """

    batches: int
    epoch_limit: int | None
    mid_epoch: int | None
    epoch_end: int | None
    after_validation: int

    @classmethod
    def of(cls, batches: int, epoch_length: int | None) -> Boundaries:
        """Lay out a run.

        Args:
            batches: its length, at least 6.
            epoch_length: of the trial's training loader; None if it has none.
        """
        longest = max(2, (batches - 2) // 2)
        if epoch_length is None:
            return cls(batches, None, 2, None, longest)
        epoch = min(epoch_length, longest)
        mid = None if epoch == 1 else epoch // 2
        return cls(batches, longest if epoch_length > longest else None, mid, epoch, epoch + max(1, epoch // 2 - 1) + 1)

    def plan(self, aggregation_frequency: int) -> RunPlan:
        """Return the plan of such a run, with a checkpoint within an aggregation if there is one."""
        within = self.mid_aggregation(aggregation_frequency)
        checkpoints = (self.mid_epoch, self.epoch_end, self.after_validation, within)
        return RunPlan(
            validate_after=frozenset({self.after_validation}),
            checkpoint_after=frozenset(checkpoint for checkpoint in checkpoints if checkpoint is not None),
            epoch_limit=self.epoch_limit,
            validation_batches=4,
        )

    def mid_aggregation(self, frequency: int) -> int | None:
        """Return a number of batches that does not close an update of ``frequency`` batches."""
        if frequency == 1:
            return None
        return frequency + 1 if frequency + 1 < self.batches else 1
