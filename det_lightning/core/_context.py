"""``core.init()`` and the context with all parts of the Core API, for scripts without a trial class."""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import signal
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

from det_lightning.arguments import require
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.core._checkpoint import CheckpointContext
from det_lightning.core._cluster import ClusterInfo, get_cluster_info
from det_lightning.core._preempt import PreemptContext, PreemptMode
from det_lightning.core._profiler import ProfilerContext
from det_lightning.core._searcher import SearcherContext
from det_lightning.core._task import current_task, is_try, make_try_storage
from det_lightning.core._train import EarlyExitReason, TensorboardMode, TrainContext
from det_lightning.errors import InvalidHP
from det_lightning.escaping import get_logger
from det_lightning.ranks.distributed_context import DistributedContext

logger = get_logger(__name__)

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class ExperimentalCoreContext:
    """Logs the checkpoints and models that a script uses, in place of Determined's master.

    Example:
        >>> import det_lightning as det
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     core_context.experimental.report_task_using_checkpoint("s3://bucket/checkpoints/pretrained")
    """

    def report_task_using_checkpoint(self, checkpoint: Any) -> None:
        """Log that the script uses a checkpoint."""
        logger.info("This task uses the checkpoint %s.", getattr(checkpoint, "uuid", checkpoint))

    def report_task_using_model_version(self, model_version: Any) -> None:
        """Log that the script uses a version of a model."""
        logger.info("This task uses the model version %s.", getattr(model_version, "model_version", model_version))


@dataclasses.dataclass(eq=False, repr=False)
class Context:
    """The Core API, as :func:`init` returns it.

    Attributes:
        checkpoint: uploads and downloads checkpoints.
        distributed: the other processes.
        preempt: tells whether to save and end.
        train: reports metrics, progress and status.
        searcher: tells how long to train.
        profiler: does nothing.
        experimental: logs the checkpoints and models in use.
        info: the trial of this process; None outside of experiments.

    Example:
        >>> import det_lightning as det
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     for step in range(1, 4):
        ...         core_context.train.report_training_metrics(steps_completed=step, metrics={"loss": 1 / step})
        ...         if core_context.preempt.should_preempt():
        ...             break
        >>> core_context.distributed.rank, core_context.info is None
        (0, True)
    """

    checkpoint: CheckpointContext
    _: dataclasses.KW_ONLY
    distributed: DistributedContext
    preempt: PreemptContext
    train: TrainContext
    searcher: SearcherContext
    profiler: ProfilerContext
    info: ClusterInfo | None = None
    experimental: ExperimentalCoreContext = dataclasses.field(default_factory=ExperimentalCoreContext, init=False)

    def start(self) -> None:
        """Start the parts of the context, as a ``with`` statement does."""
        self.preempt.start()

    def alert(
        self,
        title: str | None = None,
        description: str | None = None,
        level: Literal["warn", "info", "debug", "error"] | None = "info",
    ) -> None:
        """Log a message, in place of Determined's webhooks.

        Raises:
            ValueError: the level is unknown.
        """
        if level not in (None, *_LEVELS):
            raise ValueError(f"The level of an alert must be one of {', '.join(_LEVELS)}; got {level!r}.")
        logger.log(_LEVELS[level or "info"], "%s", ": ".join(filter(None, [title, description])))

    def close(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """End the parts of the context, as a ``with`` statement does; tell the other ranks of an error, ``exc_val``."""
        self.preempt.close()
        self.profiler.off()
        if exc_val is None:
            self.distributed.close()
        else:
            self.distributed.abandon(exc_val)

    def __enter__(self) -> Context:
        self.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: Any) -> None:
        """End. After an ``InvalidHP`` of any rank all ranks exit with status 0, and a search replaces the trial."""
        gave_up = isinstance(exc_val, InvalidHP)
        if gave_up:
            self.train.report_early_exit(EarlyExitReason.INVALID_HP)
        self.close(exc_type, exc_val, exc_tb)
        if gave_up or (isinstance(exc_val, Exception) and self.distributed.given_up):
            logger.info("The hyperparameters are invalid; the process ends: %s", self.distributed.given_up or exc_val)
            sys.exit(0)


def init(
    *,
    distributed: DistributedContext | None = None,
    checkpoint_storage: str | Mapping[str, Any] | None = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
    tensorboard_mode: TensorboardMode = TensorboardMode.AUTO,
) -> Context:
    """Return the Core API, to be used in a ``with`` statement.

    In a trial of ``det-lightning run`` the experiment gets the reports. Anywhere else metrics become TensorBoard files
    below ``runs/``, and checkpoints go to ``checkpoint_storage``.

    Args:
        distributed: the other processes; needed if there are any.
        checkpoint_storage: a directory, a URL (``s3://bucket/prefix``), or the section of an experiment configuration.
            Defaults to the experiment's storage, or outside of experiments to Determined's directory for local runs.
        preempt_mode: the ranks that call ``preempt.should_preempt()``.
        tensorboard_mode: whether reported metrics are written as TensorBoard files.

    Raises:
        ValueError: the trial has several slots but ``distributed`` is missing; or the storage's configuration is
            wrong.
        StorageError: the storage cannot be opened.

    Example:
        >>> import det_lightning as det
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     core_context.train.report_validation_metrics(steps_completed=1, metrics={"loss": 0.5})
        ...     with core_context.checkpoint.store_path({"steps_completed": 1}) as (path, storage_id):
        ...         _ = (path / "state.txt").write_text("0.5")
        >>> det.checkpoint.CheckpointStorage("checkpoints").list_ids() == [storage_id]
        True
    """
    is_context = distributed is None or isinstance(distributed, DistributedContext)
    advice = "For example DistributedContext.from_torch_distributed()."
    require(is_context, "core.init(distributed=...)", "a DistributedContext", distributed, advice)
    info = get_cluster_info()
    task = current_task()
    if task is not None and distributed is None and task.world_size > 1:
        raise ValueError(
            f"The trial has {task.world_size} slots: core.init() needs distributed=, such as "
            "core.DistributedContext.from_torch_distributed()."
        )
    if task is not None and (checkpoint_storage is None or is_try()):
        checkpoint_storage = task.checkpoint_storage
    elif is_try():
        is_chief = distributed is None or distributed.rank == 0
        checkpoint_storage = make_try_storage() if is_chief else None
        checkpoint_storage = checkpoint_storage if distributed is None else distributed.broadcast(checkpoint_storage)
    storage = CheckpointStorage(checkpoint_storage)
    distributed = distributed or DistributedContext()
    _print_stacks_on_signal()
    preempt = PreemptContext(distributed, preempt_mode, task)
    return Context(
        CheckpointContext(distributed, storage, task),
        distributed=distributed,
        preempt=preempt,
        train=TrainContext(distributed, storage, tensorboard_mode, task, preempt),
        searcher=SearcherContext(distributed, task),
        profiler=ProfilerContext(),
        info=info,
    )


def _print_stacks_on_signal() -> None:
    """Let a ``SIGUSR1`` without a handler print the stacks of all threads, as in Determined."""
    if not hasattr(signal, "SIGUSR1") or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL or not sys.__stderr__:
        return
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
