"""Checkpoints in Determined's format: reading, writing, finding and keeping them. Imports no Lightning."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_lightning.checkpoint.info import CheckpointInfo
    from det_lightning.checkpoint.opening import open_checkpoint
    from det_lightning.checkpoint.reading import CheckpointContent, load_checkpoint, read_checkpoint
    from det_lightning.checkpoint.retention import CheckpointRecord, Retention
    from det_lightning.checkpoint.state import TrialState
    from det_lightning.checkpoint.storage import CheckpointStorage
    from det_lightning.checkpoint.transfer import RetryPolicy
    from det_lightning.checkpoint.writer import CheckpointFiles, CheckpointWriter

# Where each name comes from: a tool that only lists checkpoints must not wait for torch.
_HOMES = {
    "CheckpointContent": "reading",
    "CheckpointFiles": "writer",
    "CheckpointInfo": "info",
    "CheckpointRecord": "retention",
    "CheckpointStorage": "storage",
    "CheckpointWriter": "writer",
    "Retention": "retention",
    "RetryPolicy": "transfer",
    "TrialState": "state",
    "load_checkpoint": "reading",
    "open_checkpoint": "opening",
    "read_checkpoint": "reading",
}

__all__ = [
    "CheckpointContent",
    "CheckpointFiles",
    "CheckpointInfo",
    "CheckpointRecord",
    "CheckpointStorage",
    "CheckpointWriter",
    "Retention",
    "RetryPolicy",
    "TrialState",
    "load_checkpoint",
    "open_checkpoint",
    "read_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
