"""Where a run stands in its training data."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from det_lightning import errors


@dataclasses.dataclass
class TrainingPosition:
    """The batch that is being trained on; the training loop moves it, the context answers from it.

    Attributes:
        initial_batch: index of the first batch of this run.
        batch_idx: index of the current batch, counted from 0 over the whole run; None before the first.
        epoch_len: number of batches in an epoch; None before the training loader is built.
    """

    initial_batch: int = 0
    batch_idx: int | None = None
    epoch_len: int | None = None

    def batch(self) -> int:
        """Return the index of the current batch.

        Raises:
            InternalException: training has not started.
        """
        if self.batch_idx is None:
            raise errors.InternalException("There is no current batch: training has not started.")
        return self.batch_idx

    def batches_trained(self) -> int:
        """Return the number of batches before the next one, counted over the whole run."""
        return self.initial_batch if self.batch_idx is None else self.batch_idx + 1

    def epoch_length(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            InternalException: the training loader is not built.
        """
        if self.epoch_len is None:
            raise errors.InternalException("The length of an epoch is not known: the training loader is not built.")
        return self.epoch_len


class PositionName:
    """A name under which an object shows, and lets set, an attribute of its ``position``.

    Args:
        attribute: of :class:`TrainingPosition`.
    """

    def __init__(self, attribute: str) -> None:
        self._attribute = attribute
        self._get = operator.attrgetter(f"position.{attribute}")

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the attribute; on the class, this."""
        return self if instance is None else self._get(instance)

    def __set__(self, instance: Any, value: int | None) -> None:
        """Set the attribute."""
        setattr(instance.position, self._attribute, value)
