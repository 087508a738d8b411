"""Checkpoints in Determined's format: reading, writing, finding and keeping them. Imports no Lightning."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_lightning.checkpoint.format.content import CheckpointContent, TrialState
    from det_lightning.checkpoint.format.resume_state import ResumeState
    from det_lightning.checkpoint.retention.rule import CheckpointRecord, Retention
    from det_lightning.checkpoint.safe_load import load_checkpoint, read_checkpoint
    from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
    from det_lightning.checkpoint.storage.metadata import CheckpointInfo
    from det_lightning.checkpoint.storage.transfer import RetryPolicy, open_checkpoint
    from det_lightning.checkpoint.storage.writer import CheckpointWriter

# Where each name comes from: a tool that only lists checkpoints must not wait for torch.
_MODULES = {
    "CheckpointContent": "format.content",
    "CheckpointInfo": "storage.metadata",
    "CheckpointRecord": "retention.rule",
    "CheckpointStorage": "storage.checkpoint_storage",
    "CheckpointWriter": "storage.writer",
    "ResumeState": "format.resume_state",
    "Retention": "retention.rule",
    "RetryPolicy": "storage.transfer",
    "TrialState": "format.content",
    "load_checkpoint": "safe_load",
    "open_checkpoint": "storage.transfer",
    "read_checkpoint": "safe_load",
}

__all__ = [
    "CheckpointContent",
    "CheckpointInfo",
    "CheckpointRecord",
    "CheckpointStorage",
    "CheckpointWriter",
    "ResumeState",
    "Retention",
    "RetryPolicy",
    "TrialState",
    "load_checkpoint",
    "open_checkpoint",
    "read_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
