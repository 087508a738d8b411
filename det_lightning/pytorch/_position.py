"""The position of a run in its training data."""

from __future__ import annotations

import dataclasses

from det_lightning import errors


@dataclasses.dataclass
class TrainingPosition:
    """The batch that is being trained on; indices count from 0 over the whole run.

    ``batch_idx`` is None before the first batch, and ``epoch_len`` before the training loader is built.
    """

    initial_batch: int = 0
    batch_idx: int | None = None
    epoch_len: int | None = None

    def batches_trained(self) -> int:
        """Return the number of batches before the next one, over the whole run."""
        return self.initial_batch if self.batch_idx is None else self.batch_idx + 1

    def epoch_length(self) -> int:
        """Return the number of batches in an epoch; raise an InternalException if it is not known yet."""
        if self.epoch_len is None:
            raise errors.InternalException("The length of an epoch is not known: the training loader is not built.")
        return self.epoch_len

    def current_train_batch(self) -> int:
        """Return the index of the current batch; raise an InternalException before training has started."""
        if self.batch_idx is None:
            raise errors.InternalException("There is no current batch: training has not started.")
        return self.batch_idx

    def current_train_epoch(self) -> int:
        """Return the index of the current epoch, from 0."""
        return self.current_train_batch() // self.epoch_length()

    def is_epoch_start(self) -> bool:
        """Return whether the current batch is the first of its epoch."""
        return self.current_train_batch() % self.epoch_length() == 0

    def is_epoch_end(self) -> bool:
        """Return whether the current batch is the last of its epoch."""
        return (self.current_train_batch() + 1) % self.epoch_length() == 0

    def get_initial_batch(self) -> int:
        """Return the index of the first batch of this run: 0, or where the checkpoint that it resumes from stopped."""
        return self.initial_batch
