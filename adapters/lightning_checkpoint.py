"""Checkpoints where Lightning reads and writes them: Determined's directories, and what Lightning's files lack."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from pytorch_lightning.__version__ import version as lightning_version
from pytorch_lightning.plugins.io import CheckpointIO

from det_lightning.checkpoint.format import numpy_globals, read_checkpoint

__all__ = ["DETERMINED_KEY", "TRIAL_KEY", "TrialCheckpointIO"]

#: Where a loaded Determined checkpoint stands in the dict that Lightning passes around.
DETERMINED_KEY = "determined_checkpoint"
#: Where a TrialModule keeps its own state in a checkpoint file of Lightning's.
TRIAL_KEY = "det_lightning"


class TrialCheckpointIO(CheckpointIO):
    """Reads directories in Determined's format, so that ``ckpt_path=`` takes one; files are left to ``inner``.

    Args:
        inner: Lightning's own reader and writer.
        trusted: unpickle anything, running whatever code a checkpoint asks for.
    """

    def __init__(self, inner: CheckpointIO, trusted: bool = False) -> None:
        self.inner = inner
        self.trusted = trusted

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read ``path``; see ``read_checkpoint`` for what is raised. ``weights_only=False`` trusts the checkpoint."""
        directory = pathlib.Path(str(path).removeprefix("file://"))
        if not directory.is_dir():
            # A TrialModule's entry holds numpy's random state, which Lightning does not know to be harmless.
            with torch.serialization.safe_globals(numpy_globals()):
                return dict(self.inner.load_checkpoint(path, map_location, weights_only))
        content = read_checkpoint(directory, trusted=self.trusted or weights_only is False)
        return {
            "pytorch-lightning_version": lightning_version,
            "epoch": content.trial_state.epochs_trained,
            "global_step": content.trial_state.batches_trained,
            "state_dict": {},
            "optimizer_states": [],
            "lr_schedulers": [],
            "callbacks": {},
            DETERMINED_KEY: content,
        }

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file of Lightning's."""
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file of Lightning's."""
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        """Pass on that the run is over."""
        self.inner.teardown()
