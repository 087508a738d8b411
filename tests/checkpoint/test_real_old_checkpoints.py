"""Checkpoints that old releases really wrote: those of a PyTorchTrial are read by everything, the others by nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from det_lightning import errors, pytorch
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from det_lightning.checkpoint.safe_load import inspect_checkpoint, verify_checkpoint
from det_lightning.cli.app import app
from det_lightning.pytorch import load_trial_from_checkpoint_path
from tests.trials import fit_trial

OLD = Path(__file__).parent / "data/ancient-checkpoints"
KERAS = OLD / "0.17.6-keras"
BATCHES = {"0.13.13-pytorch-flex": 0, "0.17.6-pytorch": 1}
KINDS = ("weights", "safetensors", "lightning")
PYTORCH = pytest.mark.parametrize("name", BATCHES)


class OneVariable(pytorch.PyTorchTrial):
    """The trial that wrote the checkpoints."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1, bias=False))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 1)), batch_size=32)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = ((self.model(batch[0]) - 1) ** 2).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": ((self.model(batch[0]) - 1) ** 2).mean()}


def run(*arguments: object, ends_with: int = 0) -> Result:
    """Run ``det-lightning checkpoint``; a bug in it is raised here."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == ends_with, result.output
    return result


@PYTORCH
def test_checkpoint_of_a_pytorch_trial_loads_and_resumes(name: str, tmp_path: Path) -> None:
    assert inspect_checkpoint(OLD / name)["problems"] == []
    assert verify_checkpoint(OLD / name).problems == []
    content = load_checkpoint(OLD / name)
    assert content.trial_state.batches_trained == BATCHES[name]
    weight = content.state["models_state_dict"][0]["weight"]
    kind, key, *_ = content.state["rng_state"]["np_rng_state"]
    assert (kind, str(key.dtype), key.shape) == ("MT19937", "uint32", (624,))
    trial = load_trial_from_checkpoint_path(OLD / name, trial_class=OneVariable)
    assert torch.equal(trial.model.weight, weight)
    arguments = {"max_length": pytorch.Batch(BATCHES[name] + 1), "latest_checkpoint": OLD / name}
    fit_trial(OneVariable, hparams={"global_batch_size": 32}, checkpoint_storage=tmp_path, **arguments)
    (new,) = CheckpointStorage(tmp_path).list_ids()
    moved = load_checkpoint(tmp_path / new).state["models_state_dict"][0]["weight"]
    (group,) = content.state["optimizers_state_dict"][0]["param_groups"]
    assert torch.allclose(moved, weight - group["lr"] * 2 * (weight - 1))


@PYTORCH
def test_one_of_a_pytorch_trial_is_exported(name: str, tmp_path: Path) -> None:
    for kind in KINDS:
        run("export", OLD / name, "--to", kind, "-o", tmp_path / kind)
    weights, ckpt = (torch.load(tmp_path / kind, weights_only=True) for kind in ("weights", "lightning"))
    for (weight,) in (weights.values(), ckpt["state_dict"].values()):
        assert torch.equal(weight, load_checkpoint(OLD / name).state["models_state_dict"][0]["weight"])


def test_keras_trial_is_refused(tmp_path: Path) -> None:
    for read in (load_checkpoint, load_trial_from_checkpoint_path):
        with pytest.raises(errors.InvalidCheckpointException, match="is a checkpoint of a TFKerasTrial"):
            read(KERAS)
    for kind in KINDS:
        run("export", KERAS, "--to", kind, "-o", tmp_path / "file", ends_with=1)
        assert not (tmp_path / "file").exists()
    assert "damaged" not in run("show", KERAS, ends_with=1).output + run("verify", KERAS, ends_with=1).output
    (problem,) = verify_checkpoint(KERAS).problems
    assert inspect_checkpoint(KERAS)["problems"] == [problem]


@pytest.mark.parametrize("has_metadata", [True, False])
def test_keras_trial_is_never_deleted(has_metadata: bool, tmp_path: Path) -> None:
    checkpoint = tmp_path / "6f4ba8b0-0000-4000-8000-000000000000"
    shutil.copytree(KERAS, checkpoint)
    if not has_metadata:  # as releases before 0.18 left it in a bucket
        (checkpoint / "metadata.json").unlink()
    for file in checkpoint.iterdir():
        os.utime(file, (0, 0))
    (listed,) = json.loads(run("ls", tmp_path, "--json").stdout)["checkpoints"]
    assert listed["complete"] is False


def test_checkpoint_without_tensors_is_not_exported(tmp_path: Path) -> None:
    """A checkpoint of an Estimator has its weights in TensorFlow's files, as Determined wrote it."""
    estimator = tmp_path / "estimator"
    estimator.mkdir()
    load_data = {"trial_type": "EstimatorTrial", "experiment_config": {}, "hparams": {}, "trial_cls_spec": "m:T"}
    (estimator / "load_data.json").write_text(json.dumps(load_data))
    (estimator / "metadata.json").write_text(json.dumps({"framework": "tensorflow-2.4.4", "format": "saved_model"}))
    (estimator / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-5"\n')
    assert verify_checkpoint(estimator).problems == []
    for kind in KINDS:
        run("export", estimator, "--to", kind, "-o", tmp_path / "file", ends_with=1)
        assert not (tmp_path / "file").exists()
    with pytest.raises(errors.InvalidCheckpointException, match="is a checkpoint of an EstimatorTrial"):
        load_trial_from_checkpoint_path(estimator)
    entry: dict[str, Any] = {"state": {"lr_schedulers_state_dict": []}, "trial_state": {}}
    torch.save({"state_dict": {}, "optimizer_states": [], "det_lightning": entry}, tmp_path / "empty.ckpt")
    result = run("import", tmp_path / "empty.ckpt", tmp_path / "storage", ends_with=1)
    assert "no tensor in its models, so nothing is written" in result.stderr
