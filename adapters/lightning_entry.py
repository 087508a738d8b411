"""The trial's part of the checkpoints that Lightning passes around."""

from __future__ import annotations

from typing import Any

from det_lightning.adapters.lightning_checkpoint import DETERMINED_KEY
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.lightning_file import TRIAL_KEY, from_entry, split_models, to_entry
from det_lightning.checkpoint.format.upgrade import modernize
from det_lightning.engine.resume import require_resumable
from det_lightning.engine.run import TrialRun
from det_lightning.engine.run_content import collect_content_without_weights
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._weights import load_models


def add_trial(checkpoint: dict[str, Any], run: TrialRun) -> None:
    """Add to a checkpoint of Lightning's what Lightning does not know of."""
    checkpoint[TRIAL_KEY] = to_entry(collect_content_without_weights(run))


def take_content(checkpoint: dict[str, Any], context: PyTorchTrialContext, fitting: bool) -> CheckpointContent | None:
    """Return what a run goes on from; None if the checkpoint has nothing of a trial.

    Weights are loaded here, but for those in Determined's format in a fit: the callbacks may change them before.
    """
    content: CheckpointContent | None = checkpoint.get(DETERMINED_KEY)
    if content is not None:
        require_resumable(content)
        if not fitting:
            modernize(content.state, content.source)
            load_models(context, content.state, content.source, content.trial_class)
        return content
    if TRIAL_KEY not in checkpoint:
        return None
    content = from_entry(checkpoint[TRIAL_KEY])
    require_resumable(content)
    # Names may have the prefix of distributed training, which Lightning would not know what to do with.
    models, _ = split_models(checkpoint["state_dict"])
    load_models(context, {"models_state_dict": models}, content.source)
    return content
