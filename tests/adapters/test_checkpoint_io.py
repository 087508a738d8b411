"""Lightning's own ModelCheckpoint writing Determined's format, and ckpt_path= taking it from anywhere."""

from __future__ import annotations

import uuid
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from det_lightning import errors
from det_lightning.adapters import DeterminedCheckpointIO, TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from det_lightning.pytorch import Batch, load_trial_from_checkpoint_path
from tests.adapters.training import resumes_exactly, trained
from tests.lightning import BoringModel, fit, lightning_version, pl, trainer
from tests.trials import SmallTrial, weights_of
from tests.versions import from_lightning_2_6


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints") if request.param == "disk" else f"memory://{uuid.uuid4()}"


@pytest.mark.slow
def test_model_checkpoint_keeps_the_best_directory(folder: str) -> None:
    saver = pl.callbacks.ModelCheckpoint(folder, "{epoch}", monitor="validation_loss", save_top_k=2, save_last=True)
    fit(TrialModule(SmallTrial), callbacks=[saver], max_epochs=4, plugins=[DeterminedCheckpointIO()])
    assert len(CheckpointStorage(folder).list_ids()) == 3
    assert len(saver.best_k_models) == 2
    for path in saver.best_k_models:
        epochs = load_checkpoint(path).trial_state.epochs_trained
        assert f"epoch={epochs - 1}." in path


@pytest.mark.slow
def test_a_directory_resumes_bit_equal(folder: str) -> None:
    saver = pl.callbacks.ModelCheckpoint(folder, save_last=True)
    fit(TrialModule(SmallTrial), callbacks=[saver], max_epochs=2, plugins=[DeterminedCheckpointIO()])
    assert resumes_exactly(saver.last_model_path, epochs=4)


class History(pl.Callback):
    """Keeps values, in types that torch's reader fills only by calls."""

    def __init__(self, *values: float) -> None:
        kept = deque([defaultdict(OrderedDict, a=OrderedDict(b=value)) for value in values], 3)
        self.state = {"values": kept, "same": kept}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


@pytest.mark.parametrize("plugin", [DeterminedCheckpointIO, pl.plugins.TorchCheckpointIO])
def test_states_of_callbacks_come_back(plugin: type[pl.plugins.CheckpointIO], folder: str) -> None:
    first, second = (pl.callbacks.ModelCheckpoint(folder, "{epoch}", monitor="validation_loss") for _ in range(2))
    before, after = History(1.0, 2.0), History()
    trained(callbacks=[first, before], max_epochs=2, plugins=[plugin()])
    trained(SmallTrial, first.best_model_path, callbacks=[second, after], max_epochs=2, plugins=[plugin()])
    assert (second.best_model_path, second.best_model_score) == (first.best_model_path, first.best_model_score)
    assert repr(after.state) == repr(before.state)
    assert after.state["same"] is after.state["values"]


@from_lightning_2_6
@pytest.mark.parametrize("plugin", [DeterminedCheckpointIO, pl.plugins.TorchCheckpointIO])
def test_averaged_weights_resume(plugin: type[pl.plugins.CheckpointIO], folder: str) -> None:
    def train(epochs: int, checkpoint: str | None = None) -> Any:
        callbacks = [pl.callbacks.ModelCheckpoint(folder), pl.callbacks.EMAWeightAveraging(decay=0.5)]
        return trained(SmallTrial, checkpoint, max_epochs=epochs, callbacks=callbacks, plugins=[plugin()])

    resumed = train(2, train(1).trainer.checkpoint_callback.best_model_path)
    assert torch.equal(weights_of(resumed.trial), weights_of(train(2).trial))


def test_a_trial_is_built_from_it(folder: str) -> None:
    saver = pl.callbacks.ModelCheckpoint(folder)
    module = trained(callbacks=[saver], plugins=[DeterminedCheckpointIO()])
    trial = load_trial_from_checkpoint_path(saver.best_model_path, trial_class=SmallTrial)
    assert torch.equal(weights_of(trial), weights_of(module.trial))


def test_code_comes_from_code_dir(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/model_def.py").write_text("")
    saver = pl.callbacks.ModelCheckpoint(tmp_path / "checkpoints", "only")
    fit(TrialModule(SmallTrial), callbacks=[saver], plugins=[DeterminedCheckpointIO(tmp_path / "project")])
    assert [path.name for path in (tmp_path / "checkpoints/only.ckpt/code").iterdir()] == ["model_def.py"]


def test_links_go_and_checkpoints_stay(tmp_path: Path) -> None:
    def save(name: str) -> None:
        saver = pl.callbacks.ModelCheckpoint(tmp_path, name, enable_version_counter=False)
        fit(TrialModule(SmallTrial), callbacks=[saver], plugins=[DeterminedCheckpointIO(tmp_path / "no code")])

    (tmp_path / "no code").mkdir()
    save("kept")
    before = {path: path.read_bytes() for path in (tmp_path / "kept.ckpt").rglob("*") if path.is_file()}
    for name in ("saved.ckpt", "removed.ckpt"):
        (tmp_path / name).symlink_to("kept.ckpt")
    save("saved")
    DeterminedCheckpointIO().remove_checkpoint(tmp_path / "removed.ckpt")
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.ckpt", "no code", "saved.ckpt"]
    assert not (tmp_path / "saved.ckpt").is_symlink()
    load_checkpoint(tmp_path / "saved.ckpt")


def test_other_directories_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "data.ckpt").mkdir()
    (tmp_path / "data.ckpt/precious").write_text("precious")
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "data", enable_version_counter=False)
    with pytest.raises(errors.CheckpointNotFound, match="is not a checkpoint, and is not deleted"):
        fit(TrialModule(SmallTrial), callbacks=[saver], plugins=[DeterminedCheckpointIO(tmp_path / "data.ckpt")])
    assert (tmp_path / "data.ckpt/precious").exists()


def test_other_modules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidCheckpointException, match="no entry 'det_lightning'"):
        saver = pl.callbacks.ModelCheckpoint(tmp_path)
        fit(BoringModel(), callbacks=[saver], limit_train_batches=1, plugins=[DeterminedCheckpointIO()])


def test_ckpt_path_takes_a_url() -> None:
    writer = DeterminedCheckpoint(f"memory://{uuid.uuid4()}", policy="none", period=Batch(10))
    fit(TrialModule(SmallTrial), callbacks=[writer], max_steps=20)
    assert str(writer.last_checkpoint_path).startswith("memory://")
    assert resumes_exactly(writer.last_checkpoint_path, epochs=4)


@pytest.mark.parametrize("name", ["memory://nowhere/of/this/id", "/nowhere/of/this/id"])
def test_a_missing_ckpt_path_is_named(name: str) -> None:
    with pytest.raises((errors.CheckpointNotFound, FileNotFoundError), match="nowhere/of/this/id"):
        trainer().fit(TrialModule(SmallTrial), ckpt_path=name)


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return Path.touch, (self.made,)


@pytest.mark.parametrize("plugins", [[], [pl.plugins.AsyncCheckpointIO()]], ids=["plain", "async"])
@pytest.mark.parametrize("what", ["fit", "validate"])
def test_files_with_code_are_refused(what: str, plugins: list[Any], folder: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    with fsspec.open(f"{folder}/last.ckpt", "wb", auto_mkdir=True) as file:
        torch.save({"pytorch-lightning_version": lightning_version, "state_dict": {}, "item": Payload(made)}, file)
    with pytest.raises(errors.UnsafeCheckpointError, match=r"last\.ckpt refers to pathlib\.(_local\.)?Path"):
        getattr(trainer(plugins=plugins), what)(TrialModule(SmallTrial), ckpt_path=f"{folder}/last.ckpt")
    assert not made.exists()
