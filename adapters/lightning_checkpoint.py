"""Checkpoints where Lightning reads and writes them: Determined's directories, and what Lightning's files lack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytorch_lightning.__version__ import version as lightning_version
from pytorch_lightning.plugins.io import CheckpointIO

from det_lightning.checkpoint.location import Location
from det_lightning.checkpoint.reading import load_checkpoint
from det_lightning.checkpoint.safe_values import allow_safe_values, finish

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
        options: what the file system of a URL needs to know; see ``CheckpointStorage``.
    """

    def __init__(self, inner: CheckpointIO, trusted: bool = False, options: Mapping[str, Any] | None = None) -> None:
        self.inner = inner
        self.trusted = trusted
        self.options = dict(options or {})

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the file or directory at a path or URL. ``weights_only=False`` trusts it.

        Raises:
            CheckpointError: it is missing, torn, damaged or unsafe.
        """
        if not Location.parse(path, self.options).is_dir():
            # A TrialModule's entry holds numpy's random state, which Lightning does not know to be harmless.
            with allow_safe_values():
                return dict(finish(self.inner.load_checkpoint(path, map_location, weights_only)))
        content = load_checkpoint(path, self.options, trusted=self.trusted or weights_only is False)
        return {
            "pytorch-lightning_version": lightning_version,
            "epoch": content.trial_state.epochs_trained,
            "global_step": content.trial_state.batches_trained,
            "state_dict": {},
            "optimizer_states": [],
            "lr_schedulers": [],
            "callbacks": (content.lightning or {}).get("callbacks", {}),
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
