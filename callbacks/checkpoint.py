"""Checkpoints in Determined's format."""

from __future__ import annotations

import logging
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl

from det_lightning import errors
from det_lightning.adapters.module import TrialModule
from det_lightning.callbacks.attaching import require_trial_module
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.retention.pruning import RunRetention
from det_lightning.checkpoint.retention.rule import Retention
from det_lightning.checkpoint.retention.run_claims import RunClaims, remove_dead_claims
from det_lightning.checkpoint.retention.trial_index import TrialIndex
from det_lightning.checkpoint.saving import CheckpointSaver
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.paths import new_id
from det_lightning.checkpoint.storage.writer import CheckpointWriter
from det_lightning.core._distributed import DistributedContext
from det_lightning.engine.metrics import is_numerical_scalar
from det_lightning.engine.run import TrialRun
from det_lightning.units import TrainUnit

logger = logging.getLogger(__name__)

POLICIES = ("best", "all", "none")


class DeterminedCheckpoint(pl.Callback):
    """Writes checkpoints that Determined 0.38 and det_lightning load.

    Besides those by ``period`` and by ``policy`` there is always one at the end of the training.

    Args:
        storage: a directory or URL that gets one directory for each checkpoint, the ``checkpoint_storage`` section of
            an experiment configuration, or a ``CheckpointStorage``; by default Determined's own for local runs.
        policy: which validations are followed by a checkpoint: ``"all"``, ``"best"`` (those that improve ``metric``)
            or ``"none"``.
        period: when else checkpoints are due, such as ``Batch(1000)`` or ``Epoch(1)``.
        metric: name of the validation metric that ``"best"`` compares, and ``retention``.
        smaller_is_better: whether a smaller value of ``metric`` is an improvement.
        code_dir: the directory that is copied into each checkpoint; by default the working directory.
        code_with_secrets: copy files under whose names secrets are kept too, such as ``.env``.
        async_write: copy the state and write the copy while the training goes on; by default where ``storage`` is
            remote. An error is raised at the next boundary.
        retention: which checkpoints to keep; by default what the configuration given as ``storage`` says, otherwise
            all of them.
        experiment: name of the experiment, whose trials retention compares; by default the trial is alone.
        trial: name of the trial; by default a run that goes on from a checkpoint is one trial with the run that wrote
            it, unless that one, or another that goes on from it, still lives. Only one run at a time may have the name.
        job: name of the job, by which ``storage.newest(job=...)`` finds its checkpoints again.

    Attributes:
        last_checkpoint_id: id of the checkpoint begun last, None before the first.
        last_checkpoint_path: its directory, as a path or URL; with the password, if the storage was given with one.
        best_checkpoint_path: directory of the checkpoint that followed the best validation; None before the first,
            or with another policy than ``"best"``.
        best_value: the best value of ``metric`` up to now.

    Raises:
        ValueError: the policy is unknown, or ``"best"`` has no metric.
        StorageError: the storage cannot be opened.
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
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"checkpoint_policy must be one of {', '.join(POLICIES)}; got {policy!r}.")
        if policy == "best" and metric is None:
            raise ValueError(
                "checkpoint policy 'best' needs to know the metric to compare: give metric='validation_loss', or use "
                "policy='all'."
            )
        if retention is None and isinstance(storage, Mapping):
            retention = Retention.from_config(storage)
        self.period = period
        self.storage = storage if isinstance(storage, CheckpointStorage) else CheckpointStorage(storage)
        self.last_checkpoint_id: str | None = None
        self.last_checkpoint_path: str | None = None
        self.best_checkpoint_path: str | None = None
        self.best_value: float | None = None
        self._policy = policy
        self._metric = metric
        self._smaller_is_better = smaller_is_better
        self._retention = retention
        self._experiment = experiment
        self._given_trial = trial
        self._job = job
        self._claims = RunClaims(self.storage)
        self._trial = ""
        self._lineage: dict[str, Any] = {}
        self._validated: tuple[int, float] | None = None
        self._unreported = 0
        self._abandoned = False
        in_background = not self.storage.is_local if async_write is None else async_write
        code = pathlib.Path(code_dir) if code_dir is not None else None
        writer = CheckpointWriter(self.storage, code, code_with_secrets=code_with_secrets)
        self._saver = CheckpointSaver(writer, in_background)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Offer to write the checkpoints of the module; keep other runs from deleting what it goes on from.

        Raises:
            TypeError: the module is no :class:`TrialModule`.
            StorageError: the storage refuses.
        """
        require_trial_module(self, pl_module).attach(checkpointer=self)
        if stage == "fit" and trainer.is_global_zero and trainer.ckpt_path:
            self.protect(trainer.ckpt_path)

    def protect(self, path: str | os.PathLike[str]) -> bool:
        """Keep other runs from deleting a checkpoint until this run ends; return False if one does so now.

        Args:
            path: path or URL of its directory.

        Raises:
            StorageError: the storage refuses.
        """
        return self._claims.use(path)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out which trial this is, and remove what its killed predecessors left behind.

        Raises:
            StorageError: a remote storage cannot be written to, or a live run has the name of the trial.
        """
        before = require_trial_module(self, pl_module).resume_content
        inherited = None if before is None else before.resume
        # Compare with the best value of the run that this one goes on from.
        self.best_value = None if inherited is None else inherited.best_value
        self._validated = None
        self._unreported = 0
        self._hurry_when_asked_to_end(trainer, require_trial_module(self, pl_module))
        if trainer.is_global_zero:
            self.storage.require_writable()
            self.storage.remove_abandoned()
            remove_dead_claims(self.storage.root)
            self._trial = self._claims.claim_trial(
                self._experiment, self._given_trial, None if inherited is None else inherited.trial
            )
            parent = before.name if before is not None and before.name else None
            self._lineage = self._claims.trace_back(trainer.ckpt_path, parent)
            self._saver.retention = self._make_retention(parent)

    def _hurry_when_asked_to_end(self, trainer: pl.Trainer, module: TrialModule) -> None:
        """Pause no longer between the attempts at a storage that fails when the process was asked to end."""
        self._abandoned = False

        def is_ending() -> bool:
            asked = module.stop_request is not None and module.stop_request.requested
            return self._abandoned or asked or trainer.received_sigterm

        self.storage.hurry_when(is_ending)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make room for copies of the state that are written in the background."""
        context = require_trial_module(self, pl_module).trial_run.context
        if trainer.is_global_zero and not context.backend.states.is_sharded:
            self._saver.expect(context.models, context.optimizers)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let go of the run: the storage may be used on."""
        self.storage.hurry_when(lambda: False)

    def _make_retention(self, resumed_from: str | None) -> RunRetention | None:
        if self._retention is None:
            return None
        experiment = self._experiment or self._trial
        index = TrialIndex(self.storage.root, experiment, self._trial, self._metric, self._smaller_is_better)
        run_retention = RunRetention(self.storage, index, self._retention, self._claims.run_id)
        run_retention.catch_up(resumed_from)
        return run_retention

    def save(self, run: TrialRun) -> None:
        """Write a checkpoint of ``run``, or begin to.

        Raises:
            CheckpointError: it, or the one before, cannot be written; earlier checkpoints are as they were.
        """
        self.report_complete(run, wait=True)
        run.state.last_ckpt = run.state.batches_trained
        distributed = run.context.distributed
        checkpoint_id = distributed.broadcast(new_id())
        content = run.checkpoint_content()
        if content is not None:
            metric = self._metric_after(run.state.batches_trained)
            self._add_notes(content, metric)
            report_written = run.events.report_written if run.events.wants_written() else None
            self._saver.save(content, metric, report_written, checkpoint_id)
            logger.info("Checkpoint %s after %d batches.", checkpoint_id, run.state.batches_trained)
        self._unreported += 1
        self.last_checkpoint_id = checkpoint_id
        self.last_checkpoint_path = (self.storage.root / checkpoint_id).url
        self.report_complete(run)

    def _metric_after(self, batches_trained: int) -> float | None:
        steps, value = self._validated or (-1, None)
        return value if steps == batches_trained else None

    def _add_notes(self, content: CheckpointContent, metric: float | None) -> None:
        content.notes.update(trial=self._trial, experiment=self._experiment or self._trial, **self._lineage)
        if self._job is not None:
            content.notes["job"] = self._job
        if metric is not None:
            content.notes["metric"] = {
                "name": self._metric,
                "value": metric,
                "smaller_is_better": self._smaller_is_better,
            }
        if content.resume is not None:
            content.resume.best_value = self.best_value
            content.resume.trial = self._trial

    def report_complete(self, run: TrialRun, wait: bool = False) -> None:
        """Tell the trial, on every rank, of the checkpoints that have become complete.

        Args:
            run: the trial's.
            wait: for the one that is under way.

        Raises:
            CheckpointError: it cannot be written; on every rank.
        """
        distributed = run.context.distributed
        # Not every connection can be used by two threads, as that which writes in the background is one.
        if distributed.rank == 0 and (not self._unreported or self.storage.root.is_object_store):
            self._claims.renew()
        if not self._unreported:
            return
        complete = _on_chief(distributed, lambda: self._saver.take_complete(wait))
        self._unreported -= len(complete)
        for checkpoint_id in complete:
            run.events.emit("on_checkpoint_upload_end", uuid=checkpoint_id)

    def finish(self, run: TrialRun) -> None:
        """Wait until all is written, and look for what this run has written.

        Raises:
            CheckpointError: a checkpoint cannot be written.
            StorageError: some have vanished; names them.
        """
        self.report_complete(run, wait=True)
        _on_chief(run.context.distributed, self._saver.finish)

    def close(self) -> None:
        """Give up the name of the trial, and what keeps others from deleting checkpoints."""
        self._claims.release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give up the name of the trial if the run failed before it began; otherwise that is done at its end."""
        if require_trial_module(self, pl_module).driver is None:
            self.close()

    def abandon(self, run: TrialRun) -> None:
        """Finish what is under way on this rank, when the run has failed and the other ranks may be gone.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._unreported = 0
        self._abandoned = True
        if self._saver.is_under_way():
            logger.warning("A checkpoint is being written; the process waits for it. Ctrl-C would give it up.")
        try:
            complete = self._saver.take_complete(wait=True)
        finally:
            self._abandoned = False  # the storage may be used on
        for checkpoint_id in complete:
            run.events.emit("on_checkpoint_upload_end", uuid=checkpoint_id)

    def save_after_validation(self, run: TrialRun, metrics: dict[str, Any]) -> None:
        """Write a checkpoint if the policy wants one after a validation with these metrics.

        Raises:
            ValueError: the metric to compare is not among them, or is no number.
        """
        value = self._value_of(metrics)
        if value is not None:
            self._validated = run.state.batches_trained, value
        improved = self._policy == "best" and value is not None and self._improves(value)
        if (improved or self._policy == "all") and not run.checkpoint_is_current():
            self.save(run)
        elif value is not None:
            self._saver.note_metric(run.state.batches_trained, value)
        if improved:
            self.best_checkpoint_path = self.last_checkpoint_path

    def _value_of(self, metrics: dict[str, Any]) -> float | None:
        value = metrics.get(self._metric or "")
        if value is not None and is_numerical_scalar(value):
            return float(value)
        if self._policy != "best":
            return None
        raise ValueError(
            f"checkpoint policy 'best' compares the validation metric {self._metric!r}, which must be a number; "
            f"the validation returned {sorted(metrics)}"
            + (f", and {self._metric!r} is {value!r}." if value is not None else ".")
        )

    def _improves(self, now: float) -> bool:
        before = self.best_value
        better = before is None or math.isnan(before) or (now < before if self._smaller_is_better else now > before)
        if better:
            self.best_value = now
        return better


def _on_chief(distributed: DistributedContext, action: Callable[[], Any]) -> Any:
    """Return what ``action`` returns on the chief, on every rank; raise a CheckpointError on every rank."""
    outcome = None
    if distributed.rank == 0:
        try:
            outcome = action()
        except errors.CheckpointError as e:
            outcome = e
    outcome = distributed.broadcast(outcome)
    if isinstance(outcome, errors.CheckpointError):
        raise outcome
    return outcome
