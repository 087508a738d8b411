"""A time as ``val_check_interval`` of ``pl.Trainer``."""

from __future__ import annotations

import time
from collections.abc import Container

from det_lightning.pytorch._position import TrainingPosition
from det_lightning.ranks.distributed_context import DistributedContext

#: The clock that intervals are measured by, in seconds.
clock = time.monotonic


class ValidationTimer(Container[int]):
    """The batches after which ``interval_s`` has passed since the latest validation, or since training began.

    The chief's clock decides, so all ranks must ask together. ``every_epochs`` limits validations to every n-th epoch,
    as in Lightning; None or 1 means no such limit.
    """

    def __init__(
        self,
        interval_s: float,
        every_epochs: int | None,
        position: TrainingPosition,
        distributed: DistributedContext,
    ) -> None:
        self._interval_s = interval_s
        self._every_epochs = every_epochs or 1
        self._position = position
        self._distributed = distributed
        self._since = clock()

    def restart(self) -> None:
        self._since = clock()

    def __contains__(self, batches_trained: object) -> bool:
        if not isinstance(batches_trained, int):
            return False
        epoch = (batches_trained - 1) // self._position.epoch_length()
        if (epoch + 1) % self._every_epochs != 0:
            return False
        return bool(self._distributed.broadcast(clock() - self._since >= self._interval_s))
