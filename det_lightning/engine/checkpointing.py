"""The checkpoints of a run: when it is saved outside its schedule, what a checkpoint holds, which events follow."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import make_load_data
from det_lightning.checkpoint.format.resume_state import LEFT_OUT, ResumeState
from det_lightning.checkpoint.saving import CheckpointSaver
from det_lightning.checkpoint.storage.background import tensors_in
from det_lightning.checkpoint.storage.location import new_id
from det_lightning.core._metrics import as_float
from det_lightning.engine.run import TrialRun
from det_lightning.engine.shard_writing import SharedCheckpoint, take_shards_of_run
from det_lightning.escaping import escape
from det_lightning.files.plain_values import Losses
from det_lightning.masking import mask_text
from det_lightning.pytorch._legacy_trial import original_trial
from det_lightning.pytorch._pytorch_trial import SelfSavingTrial
from det_lightning.pytorch._random_state import capture_rng
from det_lightning.pytorch._weights import collect_rest, collect_resume_state, collect_weights
from det_lightning.ranks.distributed_context import DistributedContext
from det_lightning.units import TrainUnit

logger = logging.getLogger(__name__)

POLICIES = ("best", "all", "none")


@dataclasses.dataclass
class CheckpointPlan:
    """Which checkpoints a trial gets, and where; and what its latest run has written, known to every rank.

    The policy ``"best"`` compares the metric of ``saver``, also with what ``best_elsewhere`` returns on the chief: the
    best value outside the run, or None. ``best_id`` is the checkpoint written after the best validation, ``last_id``
    the one begun last, ``complete`` the latest complete one and its number of batches. ``on_complete`` is called on the
    chief for each complete checkpoint, with its id and number of batches.
    """

    saver: CheckpointSaver
    policy: str
    period: TrainUnit | None = None
    best_value: float | None = None
    best_id: str | None = None
    last_id: str | None = None
    complete: tuple[str, int] | None = None
    on_complete: Callable[[str, int], None] | None = None
    best_elsewhere: Callable[[], float | None] | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"checkpoint_policy must be one of {', '.join(POLICIES)}; got {self.policy!r}.")
        if self.policy == "best" and self.saver.metric is None:
            raise ValueError(
                "checkpoint policy 'best' needs to know the metric to compare: give metric='validation_loss', or use "
                "policy='all'."
            )

    def begin_run(self, best_value: float | None) -> None:
        """Forget what an earlier run wrote; ``best_value`` comes from the checkpoint that this run resumes from."""
        self.best_value = best_value
        self.best_id = self.last_id = self.complete = None

    def value_in(self, metrics: dict[str, Any]) -> float | None:
        """Return the value of the metric to compare; None if there is none and the policy does not need it."""
        metric = self.saver.metric
        value = metrics.get(metric or "")
        number = as_float(value)
        if number is not None or self.policy != "best":
            return number
        raise ValueError(
            f"checkpoint policy 'best' compares the validation metric {metric!r}, which must be a number; the "
            f"validation returned {sorted(metrics)}" + (f", and {metric!r} is {value!r}." if value is not None else ".")
        )

    def improves(self, value: float) -> bool:
        """Return whether a value is the best so far; if so, remember it."""
        best = self.best_value
        sign = 1 if self.saver.smaller_is_better else -1
        if is_better := best is None or math.isnan(best) or sign * value < sign * best:
            self.best_value = value
        return is_better


class RunContent:
    """Collects what the checkpoints of a run hold. All ranks call the same methods, because they gather state."""

    def __init__(self, run: TrialRun) -> None:
        self._run = run
        # The settings as they were when the next two were made of them.
        self._described: str | None = None
        self._settings: dict[str, Any] = {}
        self._load_data: dict[str, Any] = {}
        self._known_losses: set[str] = set()  # which a warning has named

    def collect(self) -> CheckpointContent | None:
        """Return the content of a checkpoint, including any changes that the trial's callbacks made to it.

        Ranks other than the chief get None, or only their part of a sharded checkpoint.
        """
        run = self._run
        context = run.context
        states = context.backend.states
        chief = context.distributed.rank == 0
        files = run.trial.collect_files() if isinstance(run.trial, SelfSavingTrial) else None
        rng = capture_rng(context.device)
        shards: dict[str, torch.Tensor] = {}
        if states.writes_shards:
            with states.in_shards():
                weights, resume = take_shards_of_run(collect_weights(context), self._resume_state(rng), shards)
        else:
            resume = self._resume_state(rng)
            weights = collect_weights(context) if chief or states.is_sharded else {}
        if not chief:
            part = CheckpointContent({}, dataclasses.replace(run.state), is_sharded=True, shards=shards)
            return part if states.writes_shards else None
        copies = list(tensors_in(weights)) if states.is_sharded and not states.writes_shards else []
        state = {**weights, **collect_rest(context, run.events.callbacks, dict(rng))}
        run.events.emit("on_checkpoint_save_start", state)
        self._follow_settings()
        content = CheckpointContent(state, dataclasses.replace(run.state), self._load_data, resume, copies=copies)
        content.is_sharded = states.writes_shards
        content.shards = shards
        if isinstance(run.trial, SelfSavingTrial):
            content.files = files
            content.notes.update(run.trial.describe_files())
        return content

    def collect_without_weights(self) -> CheckpointContent:
        """Return what Lightning's own files lack: callbacks, random state and position in the data."""
        run = self._run
        rng = capture_rng(run.context.device)
        rest = collect_rest(run.context, run.events.callbacks, dict(rng))
        resume = self._resume_state(rng)
        return CheckpointContent(rest, dataclasses.replace(run.state), self._load_data, resume, has_weights=False)

    def _resume_state(self, rng: dict[str, Any]) -> ResumeState:
        run = self._run
        journal = run.data.journal.state_dict(run.state.batches_trained * run.context.distributed.size)
        now = (rng, run.data.journal.positions(), run.has_validated)
        rng, positions, has_validated = run.before_final_validation or now
        self._follow_settings()
        return collect_resume_state(run.context, run.state, rng, journal, positions, self._settings, has_validated)

    def _follow_settings(self) -> None:
        """Describe the settings again if the trial has changed them, as it may while it trains."""
        settings = self._run.context.settings
        described = json.dumps([settings.hparams, settings.exp_conf], default=repr, skipkeys=True)
        if described == self._described:
            return
        self._described = described
        losses = Losses()
        self._settings = plain = settings.to_plain(losses)
        self._warn_of(losses)
        trial_class = type(original_trial(self._run.trial))
        # Determined wants both hyperparameters and configuration, or neither.
        complete = None not in plain.values()
        hparams, config = (plain["hparams"], plain["experiment_config"]) if complete else (None, None)
        self._load_data = make_load_data(hparams, config, f"{trial_class.__module__}:{trial_class.__qualname__}")
        if complete and LEFT_OUT in plain:
            self._load_data[LEFT_OUT] = plain[LEFT_OUT]
        if isinstance(self._run.trial, SelfSavingTrial):
            self._load_data["trial_type"] = self._run.trial.trial_type

    def _warn_of(self, losses: Losses) -> None:
        """Name the values that JSON cannot hold, each once."""
        new = [note for note in losses.notes if note not in self._known_losses]
        self._known_losses.update(new)
        if new and self._run.context.distributed.rank == 0:
            logger.warning(
                "Checkpoints store settings as JSON, and asking for what is left out is an error after loading: %s.",
                mask_text(escape("; ".join(new))),
            )


class RunCheckpoints:
    """Saves a run, and notifies the trial of complete checkpoints. All ranks call the same methods."""

    def __init__(self, run: TrialRun, plan: CheckpointPlan) -> None:
        self._run = run
        self._plan = plan
        self._content = RunContent(run)
        self._distributed = run.context.distributed
        self._saver = plan.saver
        # The metric of the latest validation, by the number of batches.
        self._metrics: dict[int, float] = {}
        self._unreported = 0
        self._batches_of: dict[str, int] = {}
        if self._distributed.rank == 0:
            run.exchange.has_completed_checkpoint = self._has_news

    def save(self) -> None:
        """Write a checkpoint, or begin to, once the previous one is written."""
        if self._unreported:
            self._report_complete(wait=True)
        run = self._run
        if self._distributed.size > 1:
            # The other ranks wait for the chief anyway, and a request to end may come while it writes.
            run.early_end.forget()
        batches_trained = run.state.batches_trained
        run.state.last_ckpt = batches_trained
        checkpoint_id = self._distributed.broadcast(new_id())
        # Noted before writing: the checkpoint may be complete even if an error is raised, such as a dead loader worker.
        self._batches_of[checkpoint_id] = batches_trained
        content = self._content.collect()
        if content is not None:
            if content.resume is not None:
                content.resume.best_value = self._plan.best_value
            metric = self._metrics.get(batches_trained)
            save = functools.partial(self._saver.save, content, metric, checkpoint_id=checkpoint_id)
            if content.is_sharded:
                shared = SharedCheckpoint(self._distributed, self._saver.storage, checkpoint_id, content)
                shared.write(save, run.events.report_written)
            else:
                save(run.events.report_written)
            if self._distributed.rank == 0:
                logger.info("Checkpoint %s after %d batches.", checkpoint_id, batches_trained)
        self._unreported += 1
        self._plan.last_id = checkpoint_id
        self._report_complete()

    def save_unless_current(self) -> None:
        """Write a checkpoint if any batch was trained since the latest one."""
        if not self._is_current():
            self.save()

    def save_after_validation(self, metrics: dict[str, Any]) -> None:
        """Write a checkpoint if the policy asks for one after a validation with these metrics.

        If they lack the metric that the policy compares, save what was trained and raise a ``ValueError``.
        """
        plan = self._plan
        try:
            value = plan.value_in(metrics)
        except ValueError as e:
            self._run.state.last_val = 0  # a run that resumes from a last batch does not take it for validated
            self.save_unless_current()
            saved = "" if plan.last_id is None else f" What was trained is saved in checkpoint {plan.last_id}."
            raise ValueError(f"{e}{saved}") from None
        if value is not None:
            self._metrics = {self._run.state.batches_trained: value}
        if plan.policy == "best" and plan.best_elsewhere is not None:
            elsewhere = self._distributed.broadcast(plan.best_elsewhere() if self._distributed.rank == 0 else None)
            if elsewhere is not None:
                plan.improves(elsewhere)
        improved = plan.policy == "best" and value is not None and plan.improves(value)
        if (improved or plan.policy == "all") and not self._is_current():
            self.save()
        elif value is not None:
            self._saver.note_metric(self._run.state.batches_trained, value)
        if improved:
            plan.best_id = plan.last_id

    def _is_current(self) -> bool:
        return self._run.state.last_ckpt == self._run.state.batches_trained

    def report_complete(self) -> None:
        """Notify the trial of newly completed checkpoints; raise on every rank if one has failed.

        This is also when the run's claims are renewed; that another run has taken one is raised on every rank, too.
        The other ranks wait for the chief only if it has already told them that there is a reason.
        """
        if self._distributed.size == 1 or self._run.exchange.checkpoint_completed:
            if self._distributed.size > 1 or self._must_renew():
                _on_chief(self._distributed, self._renew)
            self._report_complete()

    def _has_news(self) -> bool:
        return (bool(self._unreported) and not self._saver.is_under_way()) or self._must_renew()

    def _must_renew(self) -> bool:
        saver = self._saver
        # Not every connection can be shared by two threads, and the thread that writes in the background uses it too.
        return (not self._unreported or saver.storage.root.is_object_store) and saver.claims.are_due()

    def _renew(self) -> None:
        if self._must_renew():
            self._saver.claims.renew()

    def _report_complete(self, wait: bool = False) -> None:
        if not self._unreported:
            return
        complete: list[str] = _on_chief(self._distributed, self._saver.take_complete, wait)
        self._unreported -= len(complete)
        if complete and self._distributed.size > 1:
            self._run.early_end.forget()  # on_checkpoint_upload_end may ask to stop
        self._report(complete)

    def finish(self) -> None:
        """Wait until everything is written; raise a StorageError if a checkpoint of this run has vanished."""
        self._report_complete(wait=True)
        _on_chief(self._distributed, self._saver.finish)

    def abandon(self, exception: BaseException) -> None:
        """Finish what is under way on this rank after the run has failed; the other ranks may be gone."""
        self._unreported = 0
        try:
            self._report(self._saver.finish_in_a_hurry())
        except errors.CheckpointError as e:
            # This failure must not hide the error that ended the run.
            if e is not exception:
                logger.error("The checkpoint that was under way when the run failed is lost: %s", e)

    def close(self) -> None:
        """Release the trial's name, and what keeps other runs from deleting checkpoints."""
        self._saver.end()

    def _report(self, complete: list[str]) -> None:
        for checkpoint_id in complete:
            batches_trained = self._batches_of.pop(checkpoint_id)
            self._plan.complete = (checkpoint_id, batches_trained)
            if self._plan.on_complete is not None and self._distributed.rank == 0:
                self._plan.on_complete(checkpoint_id, batches_trained)
            self._run.events.emit("on_checkpoint_upload_end", uuid=checkpoint_id)


def _on_chief(distributed: DistributedContext, action: Callable[..., Any], *args: Any) -> Any:
    """Return on every rank what ``action`` returns on the chief; raise its CheckpointError on every rank."""
    outcome = None
    if distributed.rank == 0:
        try:
            outcome = action(*args)
        except errors.CheckpointError as e:
            outcome = e
    outcome = distributed.broadcast(outcome)
    if isinstance(outcome, errors.CheckpointError):
        raise outcome
    return outcome
