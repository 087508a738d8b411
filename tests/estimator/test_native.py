"""Scripts of the Native API train in this process."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed; run tox -e estimator")

import tensorflow as tf

from det_lightning import compat
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.experimental import estimator as native
from tests.estimator.small_trials import custom, training_data, validation_data

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("test", "batches"), [(True, 1), (False, 5)])
def test_script_trains_as_configured(test: bool, batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    config = {
        "hyperparameters": {"global_batch_size": 8},
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 5}},
        "checkpoint_storage": {"type": "shared_fs", "host_path": str(tmp_path / "checkpoints")},
    }
    context = native.init(config, local=True, test=test, context_dir=str(tmp_path / "code"))
    context.train_and_evaluate(
        custom(context.wrap_optimizer),
        tf.estimator.TrainSpec(lambda: training_data(context.wrap_dataset)),
        tf.estimator.EvalSpec(lambda: validation_data(context.wrap_dataset), steps=None),
    )
    newest = next(CheckpointStorage(tmp_path / "checkpoints").newest_first())
    assert tf.train.load_variable(newest, "global_step") == batches


def test_no_cluster() -> None:
    with pytest.raises(ValueError, match=r"init\(local=False\).*Pass local=True"):
        native.init({})


def test_determineds_names() -> None:
    with compat.answering_determined():
        determined: Any = importlib.import_module("determined")
        init = importlib.import_module("determined.experimental.estimator").init
        assert issubclass(determined.estimator.RunHook, tf.estimator.SessionRunHook)
        assert determined.estimator.EstimatorTrial.__module__ == "det_lightning.estimator._trial"
        assert callable(init)
