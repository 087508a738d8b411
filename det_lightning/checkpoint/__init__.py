"""Checkpoints in Determined's format: reading, writing, finding and keeping. Imports no Lightning."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_lightning.checkpoint.format.content import CheckpointContent, CheckpointReading, TrialState
    from det_lightning.checkpoint.format.resume_state import ResumeState
    from det_lightning.checkpoint.retention.policy import CheckpointPolicy, CheckpointRecord, Retention
    from det_lightning.checkpoint.safe_load import load_checkpoint, read_checkpoint
    from det_lightning.checkpoint.storage.checkpoint_info import CheckpointInfo
    from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage, open_checkpoint

# Where each name comes from: a tool that only lists checkpoints must not wait for torch.
_MODULES = {
    **dict.fromkeys(("CheckpointContent", "CheckpointReading", "TrialState"), "format.content"),
    "ResumeState": "format.resume_state",
    **dict.fromkeys(("CheckpointPolicy", "CheckpointRecord", "Retention"), "retention.policy"),
    **dict.fromkeys(("load_checkpoint", "read_checkpoint"), "safe_load"),
    **dict.fromkeys(("CheckpointStorage", "open_checkpoint"), "storage.checkpoint_storage"),
    "CheckpointInfo": "storage.checkpoint_info",
}

__all__ = [
    "CheckpointContent",
    "CheckpointInfo",
    "CheckpointPolicy",
    "CheckpointReading",
    "CheckpointRecord",
    "CheckpointStorage",
    "ResumeState",
    "Retention",
    "TrialState",
    "load_checkpoint",
    "open_checkpoint",
    "read_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
