"""Reporting a script's metrics, progress and status."""

from __future__ import annotations

import enum
import functools
import json
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from det_lightning.arguments import find_member
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import explain_errors
from det_lightning.core._preempt import PreemptContext
from det_lightning.core._reports import Reports, read_report
from det_lightning.core._task import TrialTask, default_directory, is_try, remember_run
from det_lightning.escaping import get_logger
from det_lightning.files.local_files import write_whole
from det_lightning.files.plain_values import as_plain
from det_lightning.files.strict_json import to_json
from det_lightning.masking import short_text
from det_lightning.ranks.distributed_context import DistributedContext

if TYPE_CHECKING:
    from det_lightning.core._tensorboard import TensorBoardOutput

logger = get_logger(__name__)


class TensorboardMode(enum.Enum):
    """Who writes TensorBoard files: the library, with the reported metrics (``AUTO``), or the script (``MANUAL``).

    Example:
        >>> import det_lightning as det
        >>> mode = det.core.TensorboardMode.MANUAL
        >>> with det.core.init(checkpoint_storage="checkpoints", tensorboard_mode=mode) as core_context:
        ...     core_context.train.report_training_metrics(steps_completed=1, metrics={"loss": 0.5})
        ...     list(core_context.train.get_tensorboard_path().glob("*"))
        []
    """

    AUTO = "AUTO"
    MANUAL = "MANUAL"


class EarlyExitReason(enum.Enum):
    """Why a script ends early: invalid hyperparameters, or a request to stop.

    Example:
        >>> import det_lightning as det
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     core_context.train.report_early_exit(det.core.EarlyExitReason.USER_REQUESTED_STOP)
    """

    INVALID_HP = "EXITED_REASON_INVALID_HP"
    USER_REQUESTED_STOP = "EXITED_REASON_USER_REQUESTED_STOP"


class TrainContext:
    """Reports metrics to the experiment, and on the chief writes TensorBoard files.

    Example:
        >>> import det_lightning as det
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     core_context.train.report_training_metrics(steps_completed=100, metrics={"loss": 0.5})
        ...     core_context.train.report_progress(0.25)
        ...     core_context.train.set_metadata({"data": "digits"})
        {'data': 'digits'}
    """

    def __init__(
        self,
        distributed: DistributedContext,
        storage: CheckpointStorage,
        tensorboard_mode: TensorboardMode = TensorboardMode.AUTO,
        task: TrialTask | None = None,
        preempt: PreemptContext | None = None,
    ) -> None:
        self._preempt = preempt
        self._validated_at: int | float = 0
        self._distributed = distributed
        self._storage = storage
        self._tensorboard_mode = find_member("tensorboard_mode=", TensorboardMode, tensorboard_mode)
        self._task = task
        self._reports = Reports(task)
        remember_run(self)

    def report_training_metrics(
        self, steps_completed: int, metrics: dict[str, Any], batch_metrics: list[dict[str, Any]] | None = None
    ) -> None:
        """Report training metrics.

        Args:
            steps_completed: number of batches trained.
            metrics: the metrics, for example averages since the last report.
            batch_metrics: the metrics of each batch since the last report, for the TensorBoard files.

        Raises:
            ValueError: see :meth:`report_metrics`.
        """
        of_batches = {"batch_metrics": batch_metrics} if batch_metrics else {}
        steps = self._reports.add("training", steps_completed, {**metrics, **of_batches})
        logger.info("Training metrics after %d batches: %s", steps, metrics)
        self._report("training", steps, metrics)
        if (output := self._find_output()) is not None:
            output.add_training(int(steps), metrics, batch_metrics or [])
        if self._preempt is not None and steps > self._validated_at:
            self._preempt.end_unless_asked()

    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Report the metrics of a validation, the basis of a search's decisions.

        Args:
            steps_completed: number of batches trained before the validation.
            metrics: the metrics; ``bytes`` values are not reported.

        Raises:
            ValueError: see :meth:`report_metrics`.
            RuntimeError: a metric is None, in a trial of an experiment.
        """
        if self._preempt is not None:
            self._preempt.end_unless_asked()
        reported = metrics if self._task is None else _select_reportable(metrics)
        self._validated_at = steps = self._reports.add("validation", steps_completed, reported)
        logger.info("Validation metrics after %d batches: %s", steps, metrics)
        # A search may compare trials by how far training has come.
        self._report("validation", steps, {"batches": steps, **reported})
        if (output := self._find_output()) is not None:
            output.add_validation(int(steps), metrics)
        if self._preempt is not None and is_try():
            self._preempt.end_try()

    def report_metrics(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Report metrics of any group.

        Args:
            group: name of the group, without ``.``; ``"training"`` and ``"validation"`` are training and validation.
            steps_completed: number of batches trained.
            metrics: the metrics. A run reports a single value of a metric for each step; a restarted trial may report
                the same steps again.

        Raises:
            ValueError: ``steps_completed`` is negative, or not a whole number in a trial of an experiment; the metric
                ``epoch`` is not a number; a metric has a value for this step already; or the name of the group cannot
                be used, in a trial of an experiment. The message names all mistakes.
            RuntimeError: a validation metric is None, in a trial of an experiment.
        """
        if group == "training":
            self.report_training_metrics(steps_completed, metrics)
        elif group == "validation":
            self.report_validation_metrics(steps_completed, metrics)
        else:
            if self._task is not None:
                _require_group_name(group)
            steps = self._reports.add(group, steps_completed, metrics)
            logger.info("Metrics %s after %d batches: %s", group, steps, metrics)
            self._report(group, steps, metrics)

    def report_progress(self, progress: float) -> None:
        """Report the fraction of the training that is done.

        Args:
            progress: from 0 to 1.

        Raises:
            ValueError: ``progress`` is not from 0 to 1, in a trial of an experiment.
        """
        logger.info("Progress: %s.", progress)
        if self._task is not None:
            fraction = read_report(progress)
            if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
                raise ValueError(f"Progress must be a number from 0 to 1; got {short_text(fraction)}.")
            self._task.report("progress", None, {"progress": fraction})

    def set_status(self, status: str) -> None:
        """Report the script's current activity in a few words."""
        logger.info("Status: %s.", status)
        if self._task is not None:
            self._write("status.json", {"status": status})

    def set_metadata(self, metadata: dict[str, Any]) -> dict[str, Any] | None:
        """Replace the metadata of the run, stored as ``metadata.json`` in the run's directory; return the metadata."""
        logger.info("The metadata are in %s.", self._write("metadata.json", metadata))
        return self.get_metadata()

    def get_metadata(self) -> dict[str, Any] | None:
        """Return the metadata of the run; empty if none were set."""
        try:
            content: dict[str, Any] = json.loads((self._directory / "metadata.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return content

    def get_tensorboard_path(self) -> pathlib.Path:
        """Return the directory of the run's TensorBoard files."""
        return self._directory if self._task is None else self._task.tensorboard_path

    def upload_tensorboard_files(
        self,
        selector: Callable[[pathlib.Path], bool] = lambda _: True,
        mangler: Callable[[pathlib.Path, int], pathlib.Path] = lambda path, _: path,
    ) -> None:
        """Upload the TensorBoard files of this rank to the checkpoint storage, if remote.

        Args:
            selector: called with the path of each file, returns whether to upload.
            mangler: called with the path of a file in the directory and the rank, returns the path of the copy.

        Raises:
            RuntimeError: the mode is ``AUTO``, in a trial of an experiment.
            StorageError: the storage refuses.
        """
        if self._tensorboard_mode is TensorboardMode.AUTO and self._task is not None:
            raise RuntimeError(
                "upload_tensorboard_files() needs core.init(tensorboard_mode=TensorboardMode.MANUAL); in the mode AUTO "
                "files are written by the library."
            )
        directory = self.get_tensorboard_path()
        files = [path for path in sorted(directory.rglob("*")) if path.is_file() and selector(path)]
        logger.info("%d TensorBoard files in %s.", len(files), directory)
        if self._storage.is_local:
            return
        task = self._task
        run = self._directory.name if task is None else f"experiment-{task.experiment_id}-trial-{task.trial_id}"
        target = self._storage.root.bookkeeping("tensorboard", run)
        for path in files:
            copy = target / mangler(path.relative_to(directory), self._distributed.rank).as_posix()
            with explain_errors("writing", copy):
                copy.fs.put_file(str(path), copy.path)

    def report_early_exit(self, reason: EarlyExitReason) -> None:
        """Report an early end of the script; ``with core.init()`` does this for ``InvalidHP``."""
        reason = EarlyExitReason(reason)
        logger.info("Early exit: %s.", reason.name)
        if self._task is not None:
            self._task.report("early_exit", None, {"reason": reason.name})

    def get_experiment_best_validation(self) -> float | None:
        """Return the best value of the searcher's metric in the experiment; None if there is none yet."""
        return None if self._task is None else self._task.best_of_experiment()

    @functools.cached_property
    def _directory(self) -> pathlib.Path:
        """The trial's directory; outside of experiments a new directory, created by the first write."""
        return default_directory() if self._task is None else self._task.directory

    def _write(self, name: str, content: dict[str, Any]) -> pathlib.Path:
        file = self._directory / name
        write_whole(file, to_json(as_plain(content, name.removesuffix(".json")), indent=1).encode())
        return file

    def _report(self, group: str, steps_completed: float, metrics: dict[str, Any]) -> None:
        if self._task is not None:
            self._task.report(group, steps_completed, metrics)

    def _find_output(self) -> TensorBoardOutput | None:
        if self._tensorboard_mode is TensorboardMode.MANUAL or self._distributed.rank != 0:
            return None
        return self.tensorboard

    @functools.cached_property
    def tensorboard(self) -> TensorBoardOutput:
        """The TensorBoard files of the run."""
        from det_lightning.core._tensorboard import TensorBoardOutput  # not every script writes

        return TensorBoardOutput(enabled=True, locate=self.get_tensorboard_path)


def _select_reportable(metrics: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name, value in metrics.items() if value is None]
    if missing:
        raise RuntimeError(f"Validation metrics must not be None: {', '.join(missing)}.")
    binary = [name for name, value in metrics.items() if isinstance(value, bytes | bytearray)]
    if binary:
        logger.warning("Validation metrics that are bytes are not reported: %s.", ", ".join(binary))
    return {name: value for name, value in metrics.items() if name not in binary}


def _require_group_name(group: str) -> None:
    of_checkpoints = ("checkpoint", "checkpoint_begun", "checkpoint_deleted")
    reserved = (*of_checkpoints, "early_exit", "preempted", "progress")
    if not group or "." in group or group in reserved:
        raise ValueError(
            f"The name of a group of metrics must not be empty, contain '.', or be one of {', '.join(reserved)}; got "
            f"{group!r}."
        )
