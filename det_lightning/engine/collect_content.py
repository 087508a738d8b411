"""The content of a run's checkpoints: the state of the trial, the settings, and all for an exact resume."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch

from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import make_load_data
from det_lightning.checkpoint.format.resume_state import ResumeState
from det_lightning.engine.run import StateBeforeValidation, TrialRun
from det_lightning.engine.shard_writing import take_shards_of_run
from det_lightning.escaping import get_logger
from det_lightning.pytorch._pytorch_trial import ExternalStateTrial, original_trial
from det_lightning.pytorch._random_state import capture_rng
from det_lightning.pytorch._weights import collect_rest, collect_resume_state, collect_weights

logger = get_logger(__name__)


class RunContent:
    """Collects the content of a run's checkpoints. All ranks call the same methods to gather state."""

    def __init__(self, run: TrialRun) -> None:
        self._run = run
        # The settings at the time when the next two were made.
        self._described: str | None = None
        self._settings: dict[str, Any] = {}
        self._load_data: dict[str, Any] = {}
        self._known_losses: set[str] = set()  # named in a warning

    def collect(self) -> CheckpointContent | None:
        """Return the content of a checkpoint, with changes by the trial's callbacks.

        Ranks other than the chief get None, or only their part of a sharded checkpoint.
        """
        run = self._run
        context = run.context
        states = context.backend.states
        chief = context.distributed.rank == 0
        files = run.trial.collect_files() if isinstance(run.trial, ExternalStateTrial) else None
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
        state = {**weights, **collect_rest(context, run.events.callbacks, dict(rng))}
        run.events.emit("on_checkpoint_save_start", state)
        self._follow_settings()
        content = CheckpointContent(state, dataclasses.replace(run.state), self._load_data, resume)
        content.is_sharded = states.writes_shards
        content.shards = shards
        if isinstance(run.trial, ExternalStateTrial):
            content.files = files
            content.notes.update(run.trial.describe_files())
        return content

    def collect_without_weights(self) -> CheckpointContent:
        """Return the content missing in Lightning's own files: callbacks, random state and position in the data."""
        run = self._run
        rng = capture_rng(run.context.device)
        rest = collect_rest(run.context, run.events.callbacks, dict(rng))
        resume = self._resume_state(rng)
        return CheckpointContent(rest, dataclasses.replace(run.state), self._load_data, resume, has_weights=False)

    def _resume_state(self, rng: dict[str, Any]) -> ResumeState:
        run = self._run
        journal = run.data.journal.state_dict(run.state.batches_trained)
        positions = run.data.journal.positions(run.state.batches_trained)
        kept = run.before_final_validation or StateBeforeValidation(rng, positions, run.has_validated)
        self._follow_settings()
        resume = collect_resume_state(
            run.context, run.state, kept.rng, journal, kept.positions, self._settings, kept.has_validated
        )
        if run.data.global_batch is not None:
            resume.global_batch = vars(run.data.global_batch)
        return resume

    def _follow_settings(self) -> None:
        """Describe the settings again if the trial has changed settings during the training."""
        settings = self._run.context.settings
        described = json.dumps([settings.hparams, settings.exp_conf], default=repr, skipkeys=True)
        if described == self._described:
            return
        self._described = described
        losses: list[str] = []
        self._settings = plain = settings.to_plain(losses)
        self._warn_of_losses(losses)
        trial_class = type(original_trial(self._run.trial))
        # Determined wants both hyperparameters and configuration, or neither.
        complete = None not in plain.values()
        hparams, config = (plain["hparams"], plain["experiment_config"]) if complete else (None, None)
        self._load_data = make_load_data(hparams, config, f"{trial_class.__module__}:{trial_class.__qualname__}")
        if isinstance(self._run.trial, ExternalStateTrial):
            self._load_data["trial_type"] = self._run.trial.trial_type

    def _warn_of_losses(self, losses: list[str]) -> None:
        """Name the values that JSON cannot hold, each value once."""
        new = [note for note in losses if note not in self._known_losses]
        self._known_losses.update(new)
        if new and self._run.context.distributed.rank == 0:
            logger.warning(
                "Checkpoints store settings as JSON and omit other values, which cannot be read after loading: %s.",
                "; ".join(new),
            )
