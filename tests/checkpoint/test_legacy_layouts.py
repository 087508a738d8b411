"""Every layout that a release of Determined wrote loads: as a trial, into a run, and as plain weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from det_lightning.checkpoint.format.lightning_file import to_weights
from det_lightning.checkpoint.safe_load import inspect_checkpoint, verify_checkpoint
from det_lightning.pytorch import load_trial_from_checkpoint_path
from tests.checkpoint import layouts
from tests.checkpoint.layouts import HPARAMS, LAYOUTS, Layout
from tests.cli.test_cli import json_of, run
from tests.trials import fit_trial, seed_everything

BATCHES, EPOCH_LEN = 8, 6


EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def assert_weights(found: dict[str, torch.Tensor]) -> None:
    expected = layouts.make_state(BATCHES)["models_state_dict"][0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def go_on(trial_class: Any, directory: Path, storage: Path) -> tuple[Any, list[Any]]:
    """Train on from a checkpoint; return the context and what its last batches saw."""
    seen: list[Any] = []

    class Recorded(trial_class):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            rate = self.context.optimizers[0].param_groups[0]["lr"]
            metrics = super().train_batch(batch=batch, epoch_idx=epoch_idx, batch_idx=batch_idx)
            seen.append((epoch_idx, batch_idx, rate, batch[0].tolist(), float(metrics["loss"])))
            return metrics

    seed_everything()
    arguments = {"max_length": pytorch.Batch(BATCHES + 7), "checkpoint_storage": storage}
    return fit_trial(Recorded, hparams=HPARAMS, latest_checkpoint=directory, **arguments).context, seen


@EVERY_LAYOUT
def test_trial_loads_from_stored_code(layout: Layout, tmp_path: Path) -> None:
    before = sys.modules.get("model_def")
    directory = layouts.write(tmp_path / "old", layout, BATCHES)
    if layout.described_by is None:
        with pytest.raises(ValueError, match=r"does not name the trial's class.*trial_class=.*hparams="):
            load_trial_from_checkpoint_path(directory)
        trial_class = layouts.import_trial(directory)
        trial = load_trial_from_checkpoint_path(directory, trial_class=trial_class, hparams=HPARAMS)
    else:
        trial = load_trial_from_checkpoint_path(directory)
        assert trial.context.get_experiment_config()["description"] == "from long ago"
    assert isinstance(trial, pytorch.PyTorchTrial)
    assert_weights(vars(trial)["model"].state_dict())
    assert_weights(to_weights(load_checkpoint(directory)))
    assert sys.modules.get("model_def") is before
    assert not any(path.name == "__pycache__" for path in directory.rglob("*"))


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, list[Any]]:
    """The trial of the newest layout, and what it does when it goes on from there."""
    folder = tmp_path_factory.mktemp("newest")
    directory = layouts.write(folder / "new", LAYOUTS[-1], BATCHES)
    trial_class = layouts.import_trial(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory / "code")
        return trial_class, *go_on(trial_class, directory, folder / "storage")


@EVERY_LAYOUT
def test_old_layout_resumes(layout: Layout, newest: tuple[Any, Any, list[Any]], tmp_path: Path) -> None:
    trial_class, reference, expected = newest
    directory = layouts.write(tmp_path / "old", layout, BATCHES)
    context, seen = go_on(trial_class, directory, tmp_path / "storage")
    first = 0 if layout.progress_file is None else BATCHES
    assert [entry[:2] for entry in seen] == [(i // EPOCH_LEN, i) for i in range(first, BATCHES + 7)]
    # The schedule has stepped 8 times, and halves the rate at every third.
    assert seen[0][2] == pytest.approx(0.1 / 4)
    if first == BATCHES:
        assert seen == expected
        for mine, theirs in zip(context.models[0].parameters(), reference.models[0].parameters(), strict=True):
            assert torch.equal(mine, theirs)
    (uuid,) = CheckpointStorage(tmp_path / "storage").list_ids()
    written = load_checkpoint(tmp_path / "storage" / uuid).trial_state
    assert (written.batches_trained, written.epochs_trained) == (BATCHES + 7, (BATCHES + 7) // EPOCH_LEN)


@pytest.mark.parametrize("single_keys", [True, False])
def test_model_before_0_12_13_loads(tmp_path: Path, single_keys: bool) -> None:
    layout = Layout("0.12", "state_dict.pth", single_keys, None, described_by="metadata.json")
    model = load_trial_from_checkpoint_path(layouts.write(tmp_path / "old", layout, BATCHES, layouts.FUNCTIONAL_CODE))
    assert isinstance(model, torch.nn.Linear)
    assert_weights(model.state_dict())


def test_training_before_0_12_13_resumes(tmp_path: Path) -> None:
    layout = Layout("0.12", "state_dict.pth", True, None, described_by="metadata.json")
    directory = layouts.write(tmp_path / "old", layout, BATCHES, layouts.FUNCTIONAL_CODE)
    trial_class = layouts.import_trial(directory)
    trial = fit_trial(trial_class, hparams=HPARAMS, max_length=pytorch.Batch(1), latest_checkpoint=directory)
    # After the ninth batch the rate has been halved for the third time.
    assert trial.context.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 8)


def test_old_checkpoints_are_complete_without_metadata(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    for layout in [one for one in LAYOUTS if not one.has_metadata]:
        directory = layouts.write(tmp_path / str(uuid.uuid4()), layout)
        for file in directory.rglob("*"):
            os.utime(file, (0, 0))
        assert storage.info(directory.name).complete


def test_keys_of_two_releases_are_refused(tmp_path: Path) -> None:
    directory = layouts.write(tmp_path / "old", LAYOUTS[0], BATCHES)
    state = {**layouts.make_state(), **torch.load(directory / "pedl/state_dict.pth")}
    torch.save(state, directory / "pedl/state_dict.pth")
    with pytest.raises(errors.InvalidCheckpointException, match="both 'model_state_dict' and 'models_state_dict'"):
        load_trial_from_checkpoint_path(directory)


def test_newer_layout_wins(tmp_path: Path) -> None:
    directory = layouts.write(tmp_path / "old", LAYOUTS[-1], BATCHES)
    torch.save({"model_state_dict": {}}, directory / "checkpoint.pt")
    assert_weights(load_trial_from_checkpoint_path(directory).model.state_dict())


def test_prefix_of_distributed_training_is_dropped(tmp_path: Path) -> None:
    directory = layouts.write(tmp_path / "old", LAYOUTS[-1], BATCHES)
    state = torch.load(directory / "state_dict.pth")
    (weights,) = state["models_state_dict"]
    state["models_state_dict"] = [{f"module.{name}": value for name, value in weights.items()}]
    torch.save(state, directory / "state_dict.pth")
    assert_weights(load_trial_from_checkpoint_path(directory).model.state_dict())


SCHEDULED = [torch.optim.lr_scheduler.OneCycleLR._annealing_cos, torch.optim.swa_utils.SWALR._cosine_anneal]


@pytest.mark.parametrize("function", SCHEDULED)
def test_functions_of_torchs_schedules_are_read(function: Any, tmp_path: Path) -> None:
    """Torch 1 and 2.7 kept them in states, where torch's format looks them up by getattr."""
    torch.save({"lr_schedulers_state_dict": [{"anneal_func": function}]}, tmp_path / "checkpoint.pt")
    (schedule,) = load_checkpoint(tmp_path).state["lr_schedulers_state_dict"]
    assert schedule["anneal_func"] is function


@pytest.mark.parametrize(
    ("metadata", "files", "kind"),
    [
        ({"framework": "torch-1.12.0"}, {"load_data.json": {"trial_type": "DeepSpeedTrial"}}, "of a DeepSpeedTrial"),
        ({"framework": "tensorflow-1.15.5", "format": "h5"}, {"determined-keras-model.h5": 0}, "of a TFKerasTrial"),
        ({"tensorflow_version": "2.4.1"}, {"determined-keras-model": 0}, "of a TFKerasTrial"),
        ({"framework": "tensorflow-1.15.5"}, {"saved_model.pb": 0}, "of TensorFlow or Keras (tensorflow-1.15.5)"),
        ({"tensorflow_version": "2.4.1"}, {"weights": 0}, "of TensorFlow or Keras (2.4.1)"),
        ({"steps_completed": 5}, {"weights.bin": 0}, "of a Core API script"),
    ],
)
def test_other_trial_classes_are_refused(
    metadata: dict[str, Any], files: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    for name, content in {"metadata.json": metadata, **files}.items():
        (tmp_path / name).write_text(json.dumps(content))
    for read in (load_checkpoint, load_trial_from_checkpoint_path):
        with pytest.raises(errors.InvalidCheckpointException, match=re.escape(f"is a checkpoint {kind}")):
            read(str(tmp_path))


# Checkpoints that old releases really wrote: those of a PyTorchTrial are read by everything, the others by nothing


OLD = Path(__file__).parent / "data/ancient-checkpoints"
KERAS = OLD / "0.17.6-keras"
WRITTEN_AFTER = {"0.13.13-pytorch-flex": 0, "0.17.6-pytorch": 1}
KINDS = ("weights", "safetensors", "lightning")
PYTORCH = pytest.mark.parametrize("name", WRITTEN_AFTER)


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


@PYTORCH
def test_checkpoint_of_a_pytorch_trial_loads_and_resumes(name: str, tmp_path: Path) -> None:
    assert inspect_checkpoint(OLD / name)["problems"] == []
    assert verify_checkpoint(OLD / name).problems == []
    content = load_checkpoint(OLD / name)
    assert content.trial_state.batches_trained == WRITTEN_AFTER[name]
    weight = content.state["models_state_dict"][0]["weight"]
    kind, key, *_ = content.state["rng_state"]["np_rng_state"]
    assert (kind, str(key.dtype), key.shape) == ("MT19937", "uint32", (624,))
    trial = load_trial_from_checkpoint_path(OLD / name, trial_class=OneVariable)
    assert torch.equal(trial.model.weight, weight)
    arguments = {"max_length": pytorch.Batch(WRITTEN_AFTER[name] + 1), "latest_checkpoint": OLD / name}
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


def test_keras_trial_is_never_complete(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(KERAS, tmp_path / "6f4ba8b0-0000-4000-8000-000000000000")
    for _ in range(2):
        for file in checkpoint.iterdir():
            os.utime(file, (0, 0))
        (listed,) = json_of("ls", tmp_path)["checkpoints"]
        assert listed["complete"] is False
        (checkpoint / "metadata.json").unlink(missing_ok=True)  # as releases before 0.18 left it in a bucket


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
