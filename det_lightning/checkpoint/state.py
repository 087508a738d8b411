"""How far a trial has come."""

from __future__ import annotations

import dataclasses

__all__ = ["TrialState"]


@dataclasses.dataclass
class TrialState:
    """How far a trial has come; the content of ``trial_state.pkl``.

    Attributes:
        trial_id: Determined's id of the trial, 0 for a local run.
        last_ckpt: ``batches_trained`` at the latest checkpoint.
        step_id: kept for Determined; not used.
        last_val: ``batches_trained`` at the latest validation.
        batches_trained: number of batches trained on.
        epochs_trained: number of epochs completed.
    """

    trial_id: int = 0
    last_ckpt: int = 0
    step_id: int = 0
    last_val: int = 0
    batches_trained: int = 0
    epochs_trained: int = 0
