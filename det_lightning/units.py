"""Units for the length and the periods of a run."""

from __future__ import annotations

from collections.abc import Container

__all__ = ["Batch", "Epoch", "TrainUnit"]


class TrainUnit:
    """A number of batches or epochs: a length, a period, or a schedule.

    Args:
        value: an ``int`` is a length or a period (``Batch(100)``: every 100 batches; below 1: after every batch or
            epoch); a container is a schedule (``Batch([5, 30, 45])``: after the 5th, the 30th and the 45th batch).

    Example:
        >>> from det_lightning.pytorch import Batch
        >>> [step for step in range(1, 8) if Batch(3).should_stop(step)]
        [3, 6]
        >>> [step for step in range(1, 8) if Batch([2, 5]).should_stop(step)]
        [2, 5]
    """

    def __init__(self, value: int | Container[int], *others: object) -> None:
        if others:
            name = type(self).__name__
            steps = [value, *others]
            raise TypeError(
                f"{name}() takes one value; got {len(steps)}. Pass several values as a list: {name}({steps!r})."
            )
        self.value = value

    def should_stop(self, step_num: int) -> bool:
        """Return whether batch or epoch ``step_num``, counted from 1, is due."""
        if isinstance(self.value, int):
            return self.value < 1 or (step_num != 0 and step_num % self.value == 0)
        return step_num in self.value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"


class Epoch(TrainUnit):
    """Unit of an epoch, as many batches as the training loader has.

    Example:
        >>> from det_lightning.pytorch import Epoch
        >>> Epoch(10)
        Epoch(10)
    """


class Batch(TrainUnit):
    """Unit of a training batch on each rank.

    Example:
        >>> from det_lightning.pytorch import Batch
        >>> Batch(100)
        Batch(100)
    """
