"""Reading untrusted checkpoints. Import from this package, not from its modules."""

from det_lightning.checkpoint.safe_load.inspection import Verdict, inspect_checkpoint, verify_checkpoint
from det_lightning.checkpoint.safe_load.numpy_values import allow_safe_values, finish
from det_lightning.checkpoint.safe_load.reading import (
    load_checkpoint,
    read_checkpoint,
    read_models,
    read_resume,
    read_trial_state,
)
from det_lightning.checkpoint.safe_load.state_file import read_state, warn_of_nan
from det_lightning.checkpoint.safe_load.stored_tensors import StoredTensor, read_all_parts

__all__ = [
    "StoredTensor",
    "Verdict",
    "allow_safe_values",
    "finish",
    "inspect_checkpoint",
    "load_checkpoint",
    "read_all_parts",
    "read_checkpoint",
    "read_models",
    "read_resume",
    "read_state",
    "read_trial_state",
    "verify_checkpoint",
    "warn_of_nan",
]
