"""The policy that says which validations are followed by a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from det_lightning import pytorch
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointPolicy, CheckpointStorage


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


class Trial(pytorch.PyTorchTrial):
    """Returns the given metrics from each validation."""

    def __init__(self, context: pytorch.PyTorchTrialContext, metrics: dict[str, Any]) -> None:
        self.context, self.metrics = context, metrics
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=1)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.context.backward(loss := self.model(batch[0]).sum())
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return self.metrics


def validate_once(storage: Path, policy: str, metric: str | None, metrics: dict[str, Any]) -> list[int]:
    """Validate after the first of two batches; return the numbers of batches of the checkpoints."""
    searcher = {} if metric is None else {"searcher": {"metric": metric}}
    with pytorch.init(hparams={}, exp_conf=searcher, enable_tensorboard_logging=False) as context:
        pytorch.Trainer(Trial(context, metrics), context, enable_progress_bar=False).fit(
            max_length=pytorch.Batch(2),
            validation_period=pytorch.Batch([1]),
            checkpoint_policy=policy,
            checkpoint_storage=storage,
        )
    return sorted(info.metadata["steps_completed"] for info in CheckpointStorage(storage).survey())


@pytest.mark.parametrize(
    ("policy", "metric", "metrics", "saved"),
    [
        ("best", "loss", {"loss": 2, "accuracy": 0.5}, [1, 2]),
        ("all", "loss", {"accuracy": 0.5}, [1, 2]),
        ("all", None, {"loss": 2}, [1, 2]),
        ("none", "loss", {"loss": "low"}, [2]),
    ],
)
def test_only_best_needs_the_metric(
    tmp_path: Path, policy: str, metric: str | None, metrics: dict[str, Any], saved: list[int]
) -> None:
    assert validate_once(tmp_path, policy, metric, metrics) == saved


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"accuracy": 0.5}, r"'loss', which must be a number; the validation returned \['accuracy', .*\]\."),
        ({"loss": "low"}, r"the validation returned \[.*'loss'\], and 'loss' is 'low'\."),
    ],
)
def test_best_refuses_a_missing_metric(tmp_path: Path, metrics: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message + r" The training so far is saved in checkpoint"):
        validate_once(tmp_path, "best", "loss", metrics)


@pytest.mark.parametrize("make", [CheckpointPolicy, lambda policy: DeterminedCheckpoint(policy=policy)])
def test_an_unknown_policy_is_refused(make: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="must be one of best, all, none; got 'sometimes'"):
        make("sometimes")
