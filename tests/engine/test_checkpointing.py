"""The policy that says which validations are followed by a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from det_lightning import pytorch
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointPolicy, CheckpointStorage
from tests.trials import SmallTrial, fit_trial


@pytest.mark.parametrize(
    ("smaller_is_better", "values", "improved"),
    [
        (True, [2.0, 3.0, 2.0, 1.0], [True, False, False, True]),
        (False, [2.0, 1.0, 2.0, 3.0], [True, False, False, True]),
        (True, [math.nan, 5.0, math.nan, 4.0], [True, True, False, True]),
    ],
)
def test_values_improve_on_the_best(smaller_is_better: bool, values: list[float], improved: list[bool]) -> None:
    policy = CheckpointPolicy(metric="loss", smaller_is_better=smaller_is_better)
    best = None
    for value, expected in zip(values, improved, strict=True):
        assert policy.improves(value, best) is expected
        best = value if expected else best


def validate_once(storage: Path, policy: str, metric: str | None, metrics: dict[str, Any]) -> list[int]:
    """Validate after the first of two batches; return the numbers of batches of the checkpoints."""

    class Trial(SmallTrial):
        evaluate_batch: Any = pytorch.PyTorchTrial.evaluate_batch

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return metrics

    checkpoints = DeterminedCheckpoint(storage, policy=policy, metric=metric)
    periods = {"max_length": pytorch.Batch(2), "validation_period": pytorch.Batch([1])}
    fit_trial(Trial, checkpoints=checkpoints, **periods)
    return sorted(info.metadata["steps_completed"] for info in CheckpointStorage(storage).list_checkpoints())


@pytest.mark.parametrize(
    ("policy", "metric", "metrics", "saved"),
    [
        ("best", "loss", {"loss": 2, "accuracy": 0.5}, [1, 2]),
        ("all", "loss", {"accuracy": 0.5}, [1, 2]),
        ("all", None, {"loss": 2}, [1, 2]),
        ("none", "loss", {"loss": "low"}, [2]),
    ],
)
def test_only_best_needs_the_metric(tmp_path: Path, policy: str, metric: str | None, metrics: Any, saved: Any) -> None:
    assert validate_once(tmp_path, policy, metric, metrics) == saved


def test_best_refuses_a_metric_that_is_no_number(tmp_path: Path) -> None:
    message = r"'loss', which must be a number; the validation returned \[.*'loss'\], and 'loss' is 'low'\."
    with pytest.raises(ValueError, match=message):
        validate_once(tmp_path, "best", "loss", {"loss": "low"})
