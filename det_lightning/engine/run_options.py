"""The options of a run, decided before the run begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.engine.stopping import StopRequest


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How the caller wants a run.

    Attributes:
        resumed: the checkpoint to resume from.
        stop_request: whether this process was asked to end.
        epoch_limit: the maximum number of batches in an epoch (int), or a share of the loader's batches (float).
        overfits: train every epoch on the same batches, the first in dataset order.
        keeps_training_metrics: keep the metrics of the latest training batch for hooks, as the trial returned the dict.
        keeps_validation_metrics: the same for validation batches.
        hooks_follow_report: other hooks run after a report, before anything else is due at the boundary.
        hooks_follow_validation: the same after a validation.
        has_checkpoint_news: whether the chief has a completed or failed checkpoint, unknown to other ranks.
    """

    resumed: CheckpointContent | None = None
    stop_request: StopRequest | None = None
    epoch_limit: float = 1.0
    overfits: bool = False
    keeps_training_metrics: bool = False
    keeps_validation_metrics: bool = False
    hooks_follow_report: bool = False
    hooks_follow_validation: bool = False
    has_checkpoint_news: Callable[[], bool] = lambda: False
