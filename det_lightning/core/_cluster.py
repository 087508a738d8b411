"""The cluster task that a script runs in, in Determined's terms."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class TrialInfo:
    """The trial of a cluster task."""

    trial_id: int
    experiment_id: int
    trial_seed: int
    hparams: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ClusterInfo:
    """The task that a Determined master started."""

    cluster_id: str
    agent_id: str
    slot_ids: list[int]
    task_id: str
    task_type: str
    latest_checkpoint: str | None
    user_data: dict[str, Any]
    trial: TrialInfo


def get_cluster_info() -> ClusterInfo | None:
    """Return None: det_lightning runs without a Determined master, so a task is never one of its cluster's.

    Scripts that branch on ``get_cluster_info() is None`` then choose their local branch, which is the right one.
    """
    return None
