"""The policy that says which validations are followed by a checkpoint."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest

from det_lightning.callbacks import checkpoint as callback_module
from det_lightning.checkpoint import CheckpointStorage, CheckpointWriter
from det_lightning.checkpoint.saving import CheckpointSaver
from det_lightning.engine.checkpointing import CheckpointPlan


def plan(folder: Path, policy: str = "best", metric: str | None = "loss", **options: Any) -> CheckpointPlan:
    writer = CheckpointWriter(CheckpointStorage(folder), folder)
    return CheckpointPlan(CheckpointSaver(writer, metric=metric, **options), policy)


@pytest.mark.parametrize(
    ("smaller_is_better", "values", "improved"),
    [
        (True, [2.0, 3.0, 2.0, 1.0], [True, False, False, True]),
        (False, [2.0, 1.0, 2.0, 3.0], [True, False, False, True]),
        (True, [math.nan, 5.0, math.nan, 4.0], [True, True, False, True]),
    ],
)
def test_a_value_improves_on_the_best_one_and_any_number_on_nan(
    tmp_path: Path, smaller_is_better: bool, values: list[float], improved: list[bool]
) -> None:
    best = plan(tmp_path, smaller_is_better=smaller_is_better)
    assert [best.improves(value) for value in values] == improved
    assert best.best_value == values[-1]


@pytest.mark.parametrize(
    ("policy", "metric", "metrics", "value"),
    [
        ("best", "loss", {"loss": 2, "accuracy": 0.5}, 2.0),
        ("all", "loss", {"accuracy": 0.5}, None),
        ("all", None, {"loss": 2}, None),
        ("none", "loss", {"loss": "low"}, None),
    ],
)
def test_only_the_policy_best_needs_the_metric(
    tmp_path: Path, policy: str, metric: str | None, metrics: dict[str, Any], value: float | None
) -> None:
    assert plan(tmp_path, policy, metric).value_in(metrics) == value


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"accuracy": 0.5}, r"'loss', which must be a number; the validation returned \['accuracy'\]\.$"),
        ({"loss": "low"}, r"the validation returned \['loss'\], and 'loss' is 'low'\.$"),
    ],
)
def test_best_refuses_a_validation_without_the_metric(tmp_path: Path, metrics: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(tmp_path).value_in(metrics)


@pytest.mark.parametrize(
    ("policy", "metric", "message"),
    [
        ("sometimes", "loss", "must be one of best, all, none; got 'sometimes'"),
        ("best", None, "'best' needs to know the metric"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(tmp_path: Path, policy: str, metric: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(tmp_path, policy, metric)


def test_the_callback_configures_checkpoints_and_does_not_call_the_run() -> None:
    tree = ast.parse(Path(callback_module.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module for module in imported if module and ".engine." in module} == {"det_lightning.engine.checkpointing"}
