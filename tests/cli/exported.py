"""What Determined's command line prints, made by the classes of the real one where that is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = {
    "name": "digits",
    "searcher": {"name": "random", "metric": "accuracy", "smaller_is_better": False},
    "environment": {"environment_variables": ["API_TOKEN=s3cr3t-value"]},
}
TIME = "2023-05-01T12:00:{:02}.123456789Z"


def describe_experiment(experiment_id: int = 3, **changes: Any) -> dict[str, Any]:
    """Return an element of the list that ``det experiment describe --json`` prints."""
    experiment = {
        "archived": False,
        "config": CONFIG,
        "id": experiment_id,
        "jobId": "6b4d5a0c-0000-0000-0000-000000000000",
        "name": "digits",
        "numTrials": 2,
        "originalConfig": "",
        "projectId": 1,
        "projectOwnerId": 1,
        "searcherType": "random",
        "startTime": TIME.format(0),
        "state": "STATE_COMPLETED",
        "trialIds": [7, 8],
        "username": "someone",
    }
    return {"config": CONFIG, "experiment": {**experiment, **changes}, "jobSummary": None}


def describe_trial(
    trial_id: int, checkpoints: dict[str, tuple[int, Any]], experiment_id: int = 3, **changes: Any
) -> dict[str, Any]:
    """Return what ``det trial describe --json`` prints; ``checkpoints`` has batches and metric of each id."""
    workloads: list[dict[str, Any]] = []
    for checkpoint_id, (batches, accuracy) in checkpoints.items():
        loss = {"avgMetrics": {"loss": 1.0}, "batchMetrics": None}
        metrics = {"avgMetrics": {"accuracy": accuracy, "loss": 0.5}, "batchMetrics": None}
        common = {"totalBatches": batches, "numInputs": 0, "endTime": TIME.format(batches)}
        workloads += [
            {"training": {**common, "metrics": loss}},
            {"validation": {**common, "metrics": metrics}},
            {
                "checkpoint": {
                    "endTime": TIME.format(batches + 1),
                    "metadata": {"steps_completed": batches, "framework": "torch-1.12"},
                    "resources": {"state_dict.pth": "1"},
                    "state": "STATE_COMPLETED",
                    "totalBatches": batches,
                    "uuid": checkpoint_id,
                }
            },
        ]
    trial = {
        "experimentId": experiment_id,
        "hparams": {"lr": 0.1 * trial_id, "api_key": "k3y-of-nobody"},
        "id": trial_id,
        "restarts": 0,
        "startTime": TIME.format(0),
        "state": "STATE_COMPLETED",
        "totalBatchesProcessed": 20,
    }
    return {"trial": {**trial, **changes}, "workloads": workloads}


def list_checkpoints(trial_id: int, checkpoints: dict[str, tuple[int, Any]]) -> dict[str, Any]:
    """Return what the master's ``/api/v1/experiments/ID/checkpoints`` returns."""
    listed = [
        {
            "allocationId": "a",
            "metadata": {"steps_completed": batches},
            "reportTime": TIME.format(batches),
            "resources": {"state_dict.pth": "1"},
            "state": "STATE_COMPLETED",
            "taskId": "t",
            "training": {
                "experimentConfig": CONFIG,
                "experimentId": 3,
                "hparams": {"lr": 0.1 * trial_id},
                "searcherMetric": accuracy,
                "trainingMetrics": None,
                "trialId": trial_id,
                "validationMetrics": {"avgMetrics": {"accuracy": accuracy}, "batchMetrics": None},
            },
            "uuid": checkpoint_id,
        }
        for checkpoint_id, (batches, accuracy) in checkpoints.items()
    ]
    return {"checkpoints": listed, "pagination": {"offset": 0, "limit": 0, "total": len(listed)}}


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path
