"""What the ranks of a run exchange at a boundary: metrics, and flags about the end of the run and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from det_lightning.distributed.rank_exchange import RankExchange
from det_lightning.engine.metrics import to_numpy
from det_lightning.engine.rank_metrics import average_over_ranks, reduce_validation_metrics
from det_lightning.engine.stopping import EarlyEnd, StopRequest
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._reducer import Reducer

#: In addition to the flags of :class:`EarlyEnd`: the chief has checkpoints to report.
_CHECKPOINT_COMPLETED = 1 << 8


def _no_news() -> bool:
    return False


class BoundaryExchange:
    """Reduces the metrics of a run over its ranks. All ranks call the same methods.

    ``users_code_follows`` says that user code runs between the call and :meth:`EarlyEnd.agree`.
    """

    def __init__(self, context: PyTorchTrialContext, stop_request: StopRequest | None) -> None:
        self._reducers = context.reducers
        self._ranks = RankExchange(context.distributed)
        self.early_end = EarlyEnd(context, stop_request, self._ranks)
        #: Returns whether a checkpoint has completed or failed without the other ranks knowing.
        self.has_completed_checkpoint: Callable[[], bool] = _no_news
        #: What it returned on the chief when the ranks last exchanged metrics.
        self.checkpoint_completed = False

    @property
    def may_average_later(self) -> bool:
        """Whether averaging a workload's metrics involves neither another rank nor a reducer of the trial."""
        return self.early_end.is_alone and not self._reducers.reduces_training

    def average(self, batches: list[dict[str, Any]], users_code_follows: bool) -> list[dict[str, Any]]:
        """Return the metrics of each batch of a workload, averaged over the ranks."""
        metrics, of_all_ranks = average_over_ranks(batches, self._ranks, self._flags(users_code_follows))
        self._note(of_all_ranks)
        return metrics

    def reduce_validation(
        self, batches: list[dict[str, Any]], reducer: Reducer | dict[str, Reducer], users_code_follows: bool
    ) -> dict[str, Any]:
        """Return the metrics of a validation, reduced over batches and ranks."""
        flags = self._flags(users_code_follows)
        metrics, of_all_ranks = reduce_validation_metrics(batches, reducer, self._ranks, flags)
        self._note(of_all_ranks)
        return metrics

    def broadcast_validation(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics of the chief, which validated alone."""
        of_chief: dict[str, Any] = self._ranks.broadcast(metrics)
        self.early_end.forget()
        return of_chief

    def reduce_registered(self, for_training: bool) -> dict[str, Any]:
        """Return the metrics of the trial's own reducers, as numpy values."""
        return to_numpy(self._reducers.reduce_metrics(for_training, self._ranks.allgather))

    def _flags(self, users_code_follows: bool) -> int:
        news = _CHECKPOINT_COMPLETED if self.has_completed_checkpoint() else 0
        return self.early_end.wishes(users_code_follows) | news

    def _note(self, of_all_ranks: int) -> None:
        self.checkpoint_completed = bool(of_all_ranks & _CHECKPOINT_COMPLETED)
        self.early_end.note(of_all_ranks & ~_CHECKPOINT_COMPLETED)
