"""How long a script trains: the operations of a search, of which there is one since Determined 0.38."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterator
from typing import Any

from det_lightning.arguments import find_member
from det_lightning.core._task import TrialTask
from det_lightning.escaping import get_logger
from det_lightning.ranks.distributed_context import DistributedContext

logger = get_logger(__name__)


class Unit(enum.Enum):
    """The unit of an operation's length.

    Example:
        >>> import det_lightning as det
        >>> det.core.Unit.EPOCHS.value
        'EPOCHS'
    """

    EPOCHS = "EPOCHS"
    RECORDS = "RECORDS"
    BATCHES = "BATCHES"


class SearcherMode(enum.Enum):
    """The ranks that call ``operations()``: all together (``WorkersAskChief``), or the chief (``ChiefOnly``).

    Example:
        >>> import det_lightning as det
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     if core_context.distributed.rank == 0:
        ...         for operation in core_context.searcher.operations(det.core.SearcherMode.ChiefOnly):
        ...             operation.report_completed(0.5)
    """

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    ChiefOnly = "CHEIF_ONLY"  # the spelling in Determined


class SearcherOperation:
    """A request to train up to a length, and then validate.

    Attributes:
        completed: whether the completion was reported.

    Example:
        >>> import det_lightning as det
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     for operation in core_context.searcher.operations():
        ...         for epoch in range(operation.length):
        ...             operation.report_progress(epoch + 1)
        ...         operation.report_completed(0.5)
        >>> operation.completed
        True
    """

    def __init__(self, length: int, is_chief: bool, task: TrialTask | None = None) -> None:
        self._length = length
        self.completed = False
        self._is_chief = is_chief
        self._task = task

    @property
    def length(self) -> int:
        """The total length to train for, not the length since the last operation, in the searcher's unit."""
        return self._length

    def report_progress(self, length: float) -> None:
        """Report how much of the length has been trained.

        Raises:
            RuntimeError: this is not the chief, or the operation is completed.
        """
        self._require_chief("report_progress")
        if self.completed and length != self.length:
            raise RuntimeError(f"op.report_progress({length}) was called after op.report_completed().")
        logger.info("Progress: %s of %s.", length, self.length)
        if self._task is not None:
            self._task.report("progress", None, {"progress": min(1.0, max(0.0, length / self.length))})

    def report_completed(self, searcher_metric: Any) -> None:
        """Report the end of the operation; the search only uses the metrics of reported validations.

        Raises:
            RuntimeError: this is not the chief, or completion was reported before.
        """
        self._require_chief("report_completed")
        if self.completed:
            raise RuntimeError("op.report_completed() was called twice for one operation.")
        self.completed = True
        logger.info("The operation is completed, with the searcher's metric %s.", searcher_metric)

    def _require_chief(self, method: str) -> None:
        if not self._is_chief:
            raise RuntimeError(f"Only the chief, rank 0, may call op.{method}().")


class SearcherContext:
    """The operation of the trial, of length ``searcher.max_length``, or outside of experiments of length 1.

    Asking for operations is deprecated since Determined 0.38 and warns: let the script choose the length.

    Example:
        >>> import det_lightning as det
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     for operation in core_context.searcher.operations():
        ...         print("Train for", operation.length, core_context.searcher.get_configured_units())
        ...         operation.report_completed(0.5)
        Train for 1 Unit.EPOCHS
    """

    def __init__(self, distributed: DistributedContext, task: TrialTask | None = None) -> None:
        self._distributed = distributed
        self._task = task
        searcher = {"max_length": {"epochs": 1}} if task is None else task.config.get("searcher") or {}
        self._length, self._units = _read_length(searcher)

    def operations(
        self, searcher_mode: SearcherMode = SearcherMode.WorkersAskChief, auto_ack: bool = True
    ) -> Iterator[SearcherOperation]:
        """Yield the operation.

        Args:
            searcher_mode: the ranks that call this.
            auto_ack: accepted for compatibility.

        Raises:
            ValueError: the configuration has no ``searcher.max_length``.
            RuntimeError: the chief asks for an operation before reporting the completion of the last, or another rank
                asks in the mode ``ChiefOnly``.
        """
        length = self._require_length()
        warnings.warn(
            "SearcherContext.operations() is deprecated since Determined 0.38: let the script choose the length.",
            FutureWarning,
            stacklevel=2,
        )
        ranks = self._distributed
        if find_member("searcher_mode=", SearcherMode, searcher_mode) is SearcherMode.ChiefOnly:
            if ranks.rank != 0:
                raise RuntimeError(
                    f"operations(ChiefOnly) was called by rank {ranks.rank}. In the mode ChiefOnly, only the chief, "
                    "rank 0, may; WorkersAskChief is the mode for all ranks."
                )
            ranks = DistributedContext()
        operation = SearcherOperation(ranks.broadcast(length), ranks.rank == 0, self._task)
        yield operation
        if ranks.rank == 0 and not operation.completed:
            raise RuntimeError("op.report_completed() must be called on each operation before the next one.")
        ranks.broadcast(None)  # the other ranks end with the chief

    def acknowledge_out_of_ops(self) -> None:
        """Do nothing, as since Determined 0.38; for errors see :meth:`get_configured_units`."""
        self._require_length()

    def get_configured_units(self) -> Unit | None:
        """Return the unit of ``searcher.max_length``, if any.

        Raises:
            ValueError: the configuration has no ``searcher.max_length``.
        """
        self._require_length()
        return self._units

    def _require_length(self) -> int:
        if self._length is None:
            raise ValueError(
                "core_context.searcher has no operations, because the configuration has no searcher.max_length. Add a "
                "length, or let the script choose a length without core_context.searcher."
            )
        return self._length


def _read_length(searcher: dict[str, Any]) -> tuple[int | None, Unit | None]:
    """Return the length and the unit in a section of a configuration, None where missing."""
    length = searcher.get("max_length")
    unit = searcher.get("unit")
    if isinstance(length, dict):
        ((unit, length),) = length.items()
    return length, Unit.__members__.get(str(unit).upper())
