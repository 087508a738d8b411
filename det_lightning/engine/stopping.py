"""When a run ends before its length is reached: the trial wants to, or a process was asked to end."""

from __future__ import annotations

from typing import Protocol

from det_lightning.pytorch._pytorch_context import PyTorchTrialContext

__all__ = ["EarlyEnd", "Preemption"]


class Preemption(Protocol):
    """Knows whether this process was asked to end; see ``det_lightning.callbacks.PreemptionHandler``."""

    exit_code: int

    @property
    def requested(self) -> bool:
        """Whether it was."""


class EarlyEnd:
    """Agrees with the other ranks on whether the run ends.

    Args:
        context: the trial's.
        preemption: see :class:`Preemption`; None if nothing ends the run from outside.

    Attributes:
        preempted: the run ends since a process was asked to.
    """

    def __init__(self, context: PyTorchTrialContext, preemption: Preemption | None) -> None:
        self._context = context
        self._preemption = preemption
        self.preempted = False

    def agree(self) -> bool:
        """Tell whether any rank wants to stop, or was asked to end; all ranks have to ask."""
        wishes, distributed = (self._context.get_stop_requested(), self._asked()), self._context.distributed
        of_all = [wishes] if distributed.size == 1 else distributed.allgather(wishes)
        stops = any(requested for requested, _ in of_all)
        # A trial that wanted to stop is done, and must not be started again.
        self.preempted = any(asked for _, asked in of_all) and not stops
        return stops or self.preempted

    def must_come_now(self, at_boundary: bool) -> bool:
        """Tell whether the run ends without a boundary."""
        if not at_boundary and self.may_come_now():
            self.preempted = True
        return self.preempted

    def may_come_now(self) -> bool:
        """Tell whether the only process of a run was asked to end, so that there is nobody to agree with."""
        return self._context.distributed.size == 1 and self._asked()

    def _asked(self) -> bool:
        return self._preemption is not None and self._preemption.requested
