"""The trial's part of the checkpoints that Lightning passes around."""

from __future__ import annotations

from typing import Any

from det_lightning.adapters.lightning_checkpoint import DETERMINED_KEY
from det_lightning.checkpoint.format.joined_models import split_models
from det_lightning.checkpoint.format.lightning_file import TRIAL_KEY
from det_lightning.checkpoint.format.upgrade import modernize
from det_lightning.checkpoint.safe_load.reading import CheckpointContent
from det_lightning.engine.resume import ResumePoint
from det_lightning.engine.run import TrialRun
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._random_state import capture_rng
from det_lightning.pytorch._weights import collect_rest, load_models

__all__ = ["entry_of", "take_up"]


def entry_of(run: TrialRun) -> dict[str, Any]:
    """Return what Lightning does not know of: callbacks, random state, position in the data."""
    rest = collect_rest(run.context, run.events.callbacks, capture_rng(run.context.device))
    return {TRIAL_KEY: {"state": rest, "extra": run.collect_resume(), "load_data": run.load_data()}}


def take_up(checkpoint: dict[str, Any], context: PyTorchTrialContext, fitting: bool) -> ResumePoint | None:
    """Return what a run goes on from; None if the checkpoint has nothing of a trial.

    Weights are loaded here, but for those in Determined's format in a fit: the callbacks may change them before.
    """
    content: CheckpointContent | None = checkpoint.get(DETERMINED_KEY)
    if content is not None:
        point = ResumePoint.from_checkpoint(content)
        if not fitting:
            modernize(content.state, content.source)
            load_models(context, content.state, content.source, content.trial_class)
        return point
    if TRIAL_KEY not in checkpoint:
        return None
    point = ResumePoint.from_lightning(checkpoint[TRIAL_KEY])
    # Names may have the prefix of distributed training, which Lightning would not know what to do with.
    models, _ = split_models(checkpoint["state_dict"])
    load_models(context, {"models_state_dict": models}, point.source)
    return point
