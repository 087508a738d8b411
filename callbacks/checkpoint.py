"""Writing checkpoints in Determined's format."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from det_lightning.adapters.lightning_package import pl
from det_lightning.adapters.module import require_trial_module
from det_lightning.arguments import wrong_argument
from det_lightning.checkpoint.retention.rule import Retention
from det_lightning.checkpoint.saving import CheckpointSaver
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.writer import CheckpointWriter
from det_lightning.engine.checkpointing import CheckpointPlan
from det_lightning.escaping import escape
from det_lightning.masking import mask_url
from det_lightning.units import TrainUnit

logger = logging.getLogger(__name__)


class DeterminedCheckpoint(pl.Callback):
    """Writes checkpoints that Determined 0.38 and det_lightning load.

    In addition to those by ``period`` and ``policy``, there is always one at the end of training.

    Args:
        storage: a directory or URL that gets one directory for each checkpoint, the ``checkpoint_storage`` section of
            an experiment configuration, or a ``CheckpointStorage``; by default, or with a section that only says which
            checkpoints to keep, Determined's own storage for local runs.
        policy: which validations are followed by a checkpoint: ``"all"``, ``"best"`` (those that improve ``metric``)
            or ``"none"``.
        period: when else checkpoints are due, such as ``Batch(1000)`` or ``Epoch(1)``.
        metric: name of the validation metric that ``"best"`` and ``retention`` compare.
        smaller_is_better: whether a smaller value of ``metric`` is an improvement.
        code_dir: the directory that is copied into each checkpoint; by default the working directory.
        code_with_secrets: also copy files whose names suggest secrets, such as ``.env``.
        async_write: copy the state, and write the copy while training continues; by default if ``storage`` is remote.
            An error is raised at the next boundary.
        retention: which checkpoints to keep; by default as in the configuration given as ``storage``, otherwise all.
        experiment: name of the experiment, whose trials retention compares; by default the trial is alone.
        trial: name of the trial; by default a run that resumes from a checkpoint takes the name of the run that wrote
            it, unless that run, or another one resuming from it, is alive. Only one run at a time may use a name.
        best_elsewhere: called on the chief at each validation; returns the best value of ``metric`` outside the run,
            for example in other trials of the experiment, or None. ``"best"`` compares with it too.
        on_complete: called on the chief for each complete checkpoint, with its id and number of batches.
        job: name of the job, by which ``storage.newest(job=...)`` finds its checkpoints.

    Attributes:
        storage: where the checkpoints are written.

    Raises:
        ValueError: the policy is unknown, or ``"best"`` has no metric.
        StorageError: the storage cannot be opened.

    Example:
        >>> from det_lightning.callbacks import DeterminedCheckpoint
        >>> checkpoints = DeterminedCheckpoint("checkpoints", policy="best", metric="validation_loss")

        Pass it in ``pl.Trainer(callbacks=[checkpoints])``.
    """

    def __init__(
        self,
        storage: str | os.PathLike[str] | Mapping[str, Any] | CheckpointStorage | None = None,
        *,
        policy: str = "best",
        period: TrainUnit | None = None,
        metric: str | None = None,
        smaller_is_better: bool = True,
        code_dir: str | os.PathLike[str] | None = None,
        code_with_secrets: bool = False,
        async_write: bool | None = None,
        retention: Retention | None = None,
        experiment: str | None = None,
        trial: str | None = None,
        job: str | None = None,
        best_elsewhere: Callable[[], float | None] | None = None,
        on_complete: Callable[[str, int], None] | None = None,
    ) -> None:
        _refuse_wrong_kinds(
            retention=retention,
            code_dir=code_dir,
            metric=metric,
            smaller_is_better=smaller_is_better,
            code_with_secrets=code_with_secrets,
            async_write=async_write,
        )
        if retention is None and isinstance(storage, Mapping):
            retention = Retention.from_config(storage)
            if all(name.startswith("save_") or value is None for name, value in storage.items()):
                storage = None
        self.storage = storage if isinstance(storage, CheckpointStorage) else CheckpointStorage(storage)
        self._is_default = storage is None
        code = pathlib.Path(code_dir) if code_dir is not None else None
        writer = CheckpointWriter(self.storage, code, code_with_secrets=code_with_secrets)
        self._saver = CheckpointSaver(
            writer,
            not self.storage.is_local if async_write is None else async_write,
            metric=metric,
            smaller_is_better=smaller_is_better,
            retention=retention,
            experiment=experiment,
            trial=trial,
            job=job,
        )
        self._plan = CheckpointPlan(self._saver, policy, period, best_elsewhere=best_elsewhere, on_complete=on_complete)

    @property
    def last_checkpoint_id(self) -> str | None:
        """The id of the checkpoint begun last; None before the first one."""
        return self._plan.last_id

    @property
    def last_checkpoint_path(self) -> str | None:
        """The directory of that checkpoint, as a path or URL, with the password if the storage was given with one."""
        return self._path_of(self._plan.last_id)

    @property
    def best_checkpoint_path(self) -> str | None:
        """The directory of the checkpoint after the best validation; None before, or by other policies."""
        return self._path_of(self._plan.best_id)

    @property
    def best_value(self) -> float | None:
        """The best value of ``metric`` so far."""
        return self._plan.best_value

    def describe_saved(self, resumed_from: str | None = None) -> str:
        """Return what was saved of an interrupted run, which resumed from a path or URL, and how to go on."""
        if self._plan.complete is not None:
            checkpoint_id, batches = self._plan.complete
            return (
                f"Checkpoint {checkpoint_id} in {escape(self.storage)} has the first {batches} batches. To continue: "
                f"fit(latest_checkpoint={checkpoint_id!r})."
            )
        if resumed_from is not None:
            shown = mask_url(resumed_from)
            return f"Nothing was saved since {escape(shown)}. To continue from there: fit(latest_checkpoint={shown!r})."
        return "Nothing was saved; fit(save_on_interrupt=True) saves on Ctrl-C."

    def _path_of(self, checkpoint_id: str | None) -> str | None:
        return None if checkpoint_id is None else (self.storage.root / checkpoint_id).url

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        require_trial_module(self, pl_module).checkpoint_plan = self._plan
        if stage == "fit" and trainer.is_global_zero and trainer.ckpt_path:
            self.protect(trainer.ckpt_path)

    def protect(self, path: str | os.PathLike[str]) -> bool:
        """Keep other runs from deleting the checkpoint at a path or URL until this run ends.

        Returns False if one is deleting it or already has; raises a StorageError if the storage refuses.
        """
        return self._saver.claims.use(path)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Claim the name of the trial, and begin to remove what killed runs left behind; say where checkpoints go.

        Raises:
            StorageError: the storage cannot be written to, or a live run has the name of the trial.
        """
        module = require_trial_module(self, pl_module)
        resumed = module.resume_content
        state = None if resumed is None else resumed.resume
        self._plan.begin_run(None if state is None else state.best_value)

        def is_ending() -> bool:
            asked = module.stop_request is not None and module.stop_request.requested
            return asked or trainer.received_sigterm

        self._saver.limit_retries_when(is_ending)
        if trainer.is_global_zero:
            if self._is_default:  # a warning, because warnings are shown even if logging is not configured
                logger.warning("No storage of checkpoints is given: they go to %s.", escape(self.storage))
            else:
                logger.info("Checkpoints go to %s.", escape(self.storage))
            self._saver.begin(trainer.ckpt_path, resumed)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        context = require_trial_module(self, pl_module).trial_run.context
        if trainer.is_global_zero and not context.backend.states.is_sharded:
            self._saver.reserve_memory(context.models, context.optimizers)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if require_trial_module(self, pl_module).driver is None:
            self.close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.storage.limit_retries_when(lambda: False)

    def close(self) -> None:
        """Release the trial's name, and what keeps other runs from deleting checkpoints."""
        self._saver.end()


def _refuse_wrong_kinds(**given: Any) -> None:
    """Raise a TypeError that names each argument of the wrong kind; None is always right."""
    flag = (int, "True or False")
    kinds: dict[str, tuple[Any, str]] = {
        "retention": (Retention, "a Retention, such as Retention(trial_latest=3)"),
        "code_dir": ((str, os.PathLike), "the path of a directory"),
        "metric": (str, "the name of a metric"),
        **dict.fromkeys(("smaller_is_better", "code_with_secrets", "async_write"), flag),
    }
    mistakes = [
        wrong_argument(f"DeterminedCheckpoint({name}=...)", kinds[name][1], value)
        for name, value in given.items()
        if value is not None and not isinstance(value, kinds[name][0])
    ]
    if mistakes:
        raise TypeError(" ".join(mistakes))
