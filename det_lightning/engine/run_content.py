"""Collecting what a checkpoint of a run holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.resume_state import ResumeState
from det_lightning.checkpoint.format.upgrade import make_load_data
from det_lightning.checkpoint.storage.background import tensors_in
from det_lightning.engine.run import TrialRun
from det_lightning.masking import describe_masked, mask
from det_lightning.pytorch._legacy_trial import original_trial
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._random_state import capture_rng
from det_lightning.pytorch._weights import collect_gradients, collect_rest, collect_weights


def collect_content(run: TrialRun) -> CheckpointContent | None:
    """Return the content of a checkpoint, as the trial's callbacks leave it; None except on the chief.

    All ranks must call it: sharded state, and state that each rank has of its own, is gathered.
    """
    context = run.context
    resume = _resume_state(run)
    chief = context.distributed.rank == 0
    sharded = context.backend.states.is_sharded
    weights = collect_weights(context) if chief or sharded else {}
    if not chief:
        return None
    copies = list(tensors_in(weights)) if sharded else []
    state = {**weights, **collect_rest(context, run.events.callbacks, capture_rng(context.device))}
    run.events.emit("on_checkpoint_save_start", state)
    return dataclasses.replace(_content(run, state, resume), copies=copies)


def collect_content_without_weights(run: TrialRun) -> CheckpointContent:
    """Return callbacks, random state and position in the data, which Lightning's own files lack.

    All ranks must call it.
    """
    rest = collect_rest(run.context, run.events.callbacks, capture_rng(run.context.device))
    return dataclasses.replace(_content(run, rest, _resume_state(run)), has_weights=False)


def _content(run: TrialRun, state: dict[str, Any], resume: ResumeState) -> CheckpointContent:
    trial_class = type(original_trial(run.trial))
    settings = resume.settings or {}
    # Determined wants both hyperparameters and configuration, or neither.
    complete = None not in settings.values()
    load_data = make_load_data(
        **(settings if complete else dict.fromkeys(settings)),
        trial_cls_spec=f"{trial_class.__module__}:{trial_class.__qualname__}",
    )
    return CheckpointContent(state, dataclasses.replace(run.state), load_data, resume)


def _resume_state(run: TrialRun) -> ResumeState:
    context = run.context
    distributed = context.distributed
    rng = run.rng_before_final_validation or capture_rng(context.device)
    journal = run.data.journal.state_dict(run.state.batches_trained * distributed.size)
    return ResumeState(
        trial_state=dict(vars(run.state)),
        rng_states=distributed.allgather(rng),
        journals=distributed.allgather(journal),
        optimizer_steps=context.optimizer_steps,
        gradients=_gradients_of_ranks(context),
        precision=context.precision.scaling.unfinished(),
        world_size=distributed.size,
        settings=_masked_settings(context),
    )


def _gradients_of_ranks(context: PyTorchTrialContext) -> Any:
    """Return the gradients of an aggregation under way: those of a single rank, or a list with those of each rank.

    Where they are sharded the list has only their average, on the chief.
    """
    own = collect_gradients(context)
    if context.distributed.size == 1:
        return own
    return [own] if context.backend.states.is_sharded else context.distributed.allgather(own)


def _masked_settings(context: PyTorchTrialContext) -> dict[str, Any]:
    """Return hyperparameters and experiment configuration without their secrets; None for one that is not there."""

    def value_or_none(lookup: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return lookup()
        except ValueError:
            return None

    settings = {
        "hparams": mask(value_or_none(context.get_hparams)),
        "experiment_config": mask(value_or_none(context.get_experiment_config)),
    }
    # The file holds plain values only.
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=describe_masked))
    return plain
