"""Decides when a learning rate scheduler steps: ``LRScheduler`` and its step modes.

Change here: a step mode is a member of ``StepMode`` and a case of ``steps_after``; ``port --to lightning`` writes it in
``det_lightning/porting/to_lightning/hooks.py``.
"""

from __future__ import annotations

import enum
from typing import Any

from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler


class LRScheduler:
    """A learning rate scheduler together with the rule for stepping.

    Created by ``context.wrap_lr_scheduler``; a trial rarely needs to create an object.

    Args:
        scheduler: any scheduler of ``torch.optim.lr_scheduler``, or an object with the same methods.
        step_mode: when the training loop calls :meth:`step`.
        frequency: step only every ``frequency``-th time; at least 1.

    Raises:
        TypeError: ``step_mode`` is not a :class:`LRScheduler.StepMode`.
        ValueError: ``frequency`` is below 1.

    Example:
        >>> import torch
        >>> from det_lightning import pytorch
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        >>> scheduler = pytorch.LRScheduler(
        ...     torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        ...     step_mode=pytorch.LRScheduler.StepMode.MANUAL_STEP,
        ... )
        >>> optimizer.step()
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        [0.05]
    """

    class StepMode(enum.Enum):
        """When a scheduler steps. With aggregation, only on batches with an optimizer update."""

        STEP_EVERY_EPOCH = 1
        STEP_EVERY_BATCH = 2
        MANUAL_STEP = 3
        STEP_EVERY_OPTIMIZER_STEP = 4

    def __init__(self, scheduler: TorchLRScheduler, step_mode: StepMode, frequency: int = 1) -> None:
        if not isinstance(step_mode, LRScheduler.StepMode):
            names = ", ".join(mode.name for mode in LRScheduler.StepMode)
            raise TypeError(
                f"step_mode must be an LRScheduler.StepMode (one of {names}); got {step_mode!r} of type "
                f"{type(step_mode).__name__}."
            )
        if frequency < 1:
            raise ValueError(f"frequency of {type(scheduler).__name__} must be at least 1; got {frequency}.")
        self.scheduler = scheduler
        self.step_mode = step_mode
        self.frequency = frequency

    def steps_after(self, batch_idx: int, epoch_len: int, aggregation_frequency: int) -> int:
        """Return the number of steps due after an update of the optimizers on batch ``batch_idx``.

        As in Determined 0.38.1, STEP_EVERY_OPTIMIZER_STEP compares the index of the batch with the frequency, not the
        number of updates: if frequency and aggregation share a divisor, the scheduler steps more often.
        """
        frequency = self.frequency
        if self.step_mode is LRScheduler.StepMode.STEP_EVERY_BATCH:
            return self._count_due(batch_idx + 1 - aggregation_frequency, batch_idx + 1)
        if self.step_mode is LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP:
            return int((batch_idx + 1) % frequency == 0)
        if self.step_mode is LRScheduler.StepMode.STEP_EVERY_EPOCH:
            # The step belongs to the last update before the epoch changes.
            epoch = batch_idx // epoch_len
            next_epoch = (batch_idx + aggregation_frequency) // epoch_len
            return self._count_due(epoch, next_epoch)
        return 0

    def _count_due(self, after: int, until: int) -> int:
        """Count the multiples of ``frequency`` among the numbers from ``after + 1`` to ``until``."""
        if isinstance(self.frequency, int):
            return until // self.frequency - after // self.frequency
        return sum(number % self.frequency == 0 for number in range(after + 1, until + 1))

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the wrapped scheduler."""
        self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that the scheduler set last, one per parameter group."""
        return [float(lr) for lr in self.scheduler.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)
