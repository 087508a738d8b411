"""Decides when a script learns of a preemption: ``should_preempt()``, and the handling of SIGTERM."""

from __future__ import annotations

import enum
import signal

from det_lightning.arguments import find_member
from det_lightning.core._task import TrialTask, remove_try_storages
from det_lightning.escaping import get_logger
from det_lightning.ranks.distributed_context import DistributedContext
from det_lightning.ranks.signals import EndSignals, end_by_signal

logger = get_logger(__name__)


class PreemptMode(enum.Enum):
    """The ranks that call ``should_preempt()``.

    ``WorkersAskChief``: all ranks together; if any rank was asked to end, all get True. ``ChiefOnly``: the chief; the
    script informs the other ranks. ``WorkersAskMaster``: each rank independently.

    Example:
        >>> import det_lightning as det
        >>> mode = det.core.PreemptMode.ChiefOnly
        >>> with det.core.init(checkpoint_storage="checkpoints", preempt_mode=mode) as core_context:
        ...     core_context.distributed.rank == 0 and core_context.preempt.should_preempt()
        False
    """

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    ChiefOnly = "CHIEF_ONLY"
    WorkersAskMaster = "WORKERS_ASK_MASTER"


class PreemptContext:
    """Whether this process was asked to end, by a ``SIGTERM`` from the runner of an experiment or any scheduler.

    The signal is handled from the first call of :meth:`should_preempt` on, and simply ends other scripts. In an
    experiment it is handled from :meth:`start` on: the search may stop a trial that still has to save. A script that
    reports a later step without asking ends there. A second signal ends the process at once.

    Example:
        >>> import det_lightning as det
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     core_context.preempt.should_preempt()
        ...     core_context.preempt.request()  # has the effect of SIGTERM
        ...     core_context.preempt.should_preempt()  # if True, save a checkpoint and end
        False
        True
    """

    def __init__(
        self,
        distributed: DistributedContext,
        preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
        task: TrialTask | None = None,
    ) -> None:
        self._distributed = distributed
        self._mode = find_member("preempt_mode=", PreemptMode, preempt_mode)
        self._task = task
        self._started = False
        self._acknowledged = False
        self._requested = False
        self._try_is_over = False
        self._was_asked = False
        self._signals = EndSignals(lambda _: self.request())

    def start(self) -> PreemptContext:
        """Allow calls of :meth:`should_preempt`; ``with core.init()`` does this.

        Raises:
            RuntimeError: :meth:`start` was called before.
        """
        if self._started:
            raise RuntimeError("PreemptContext.start() was called twice; `with core.init()` calls start() already.")
        self._started = True
        if self._task is not None:
            self._handle_signal()
        return self

    def close(self) -> None:
        """Restore the handler of the signal."""
        self._signals.restore()

    def __enter__(self) -> PreemptContext:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Return whether the script should save and end, to continue later.

        Args:
            auto_ack: acknowledge the first True; see :meth:`acknowledge_preemption_signal`.

        Raises:
            RuntimeError: :meth:`start` was not called, or this is not the chief and the mode is ``ChiefOnly``.
        """
        if not self._started:
            raise RuntimeError("should_preempt() was called before PreemptContext.start(); use `with core.init()`.")
        if self._mode is PreemptMode.ChiefOnly and self._distributed.rank != 0:
            raise RuntimeError(
                f"should_preempt() was called by rank {self._distributed.rank}. In the mode ChiefOnly, only the chief, "
                "rank 0, may; WorkersAskChief is the mode for all ranks."
            )
        self._handle_signal()
        self._was_asked = True
        asked = self._requested or self._try_is_over
        if self._mode is PreemptMode.WorkersAskChief:
            asked = any(self._distributed.allgather(asked))
        if asked and auto_ack and (self._distributed.rank == 0 or self._mode is PreemptMode.WorkersAskMaster):
            self.acknowledge_preemption_signal()
        return asked

    def _handle_signal(self) -> None:
        if not self._signals.installed:
            self._signals.remember([signal.SIGTERM])
            self._signals.install()

    def end_unless_asked(self) -> None:
        """End a process that was asked to end, or is a smoke run, but does not call :meth:`should_preempt`.

        In an experiment, the runner ends a smoke run.
        """
        is_over = self._try_is_over if self._task is None else self._requested
        if is_over and not self._was_asked:
            remove_try_storages()
            end_by_signal(signal.SIGTERM)

    def acknowledge_preemption_signal(self) -> None:
        """Confirm that the script ends now, before it is done; the runner will start the trial again."""
        if self._task is not None and not self._acknowledged:
            self._task.report("preempted", None, {})
        self._acknowledged = True

    def end_try(self) -> None:
        """Ask this process to end, since a smoke run has completed a validation."""
        self._try_is_over = True

    def request(self) -> None:
        """Ask this process to end, for notices other than signals."""
        self._requested = True
