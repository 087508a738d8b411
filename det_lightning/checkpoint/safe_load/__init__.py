"""Reading untrusted checkpoints. Import from this package, not from the modules."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_lightning.checkpoint.safe_load.inspection import Verdict, inspect_checkpoint, verify_checkpoint
    from det_lightning.checkpoint.safe_load.pickle_scanner import holds_placeholder, read_pickle
    from det_lightning.checkpoint.safe_load.reading import (
        StoredTensor,
        load_checkpoint,
        load_newest,
        read_all_parts,
        read_checkpoint,
        read_load_data,
        read_models,
        read_resume,
        read_trial_state,
        read_weights,
    )
    from det_lightning.checkpoint.safe_load.safe_globals import allow_safe_values, finish
    from det_lightning.checkpoint.safe_load.state_file import read_state

# Each imports the former.
_MODULES = ("safe_globals", "pickle_scanner", "state_file", "reading", "inspection")

__all__ = [
    "StoredTensor", "Verdict", "allow_safe_values", "finish", "holds_placeholder", "inspect_checkpoint",
    "load_checkpoint", "load_newest", "read_all_parts", "read_checkpoint", "read_load_data", "read_models",
    "read_pickle", "read_resume", "read_state", "read_trial_state", "read_weights", "verify_checkpoint",

]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Imported only now: a run that does not resume reads no checkpoint, and must not wait for these modules.
    if name in __all__:
        for module in _MODULES:
            members = vars(importlib.import_module(f"{__name__}.{module}"))
            if name in members:
                globals()[name] = members[name]
                return members[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
