"""Checkpoints in Determined's format: reading, writing and finding them. Imports no Lightning."""

from det_lightning.checkpoint.format import CheckpointContent, read_checkpoint
from det_lightning.checkpoint.state import TrialState
from det_lightning.checkpoint.storage import CheckpointStorage
from det_lightning.checkpoint.writer import CheckpointWriter

__all__ = ["CheckpointContent", "CheckpointStorage", "CheckpointWriter", "TrialState", "read_checkpoint"]
