"""Determined's checkpoints as Lightning's, and the other way round; nothing is lost on the way."""

from __future__ import annotations

import pickle
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from det_lightning import errors
from det_lightning.adapters import TrialModule
from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, read_checkpoint
from det_lightning.checkpoint.exports import export_lightning, export_safetensors, export_weights
from det_lightning.checkpoint.format.lightning_file import TRIAL_KEY, from_lightning, to_lightning, to_weights
from det_lightning.checkpoint.format.resume_state import read_settings
from det_lightning.checkpoint.safe_load import read_load_data, read_state
from tests import lightning
from tests.checkpoint import made_checkpoints
from tests.checkpoint.made_checkpoints import LOAD_DATA, assert_equal, forget_checksums, make_state, write_checkpoint
from tests.trials import SmallTrial, weights_of


def there_and_back(directory: Path, tmp_path: Path) -> Path:
    """Convert a checkpoint to a ``.ckpt`` file and that to a new checkpoint; return its directory."""
    export_lightning(read_checkpoint(directory), tmp_path / "file.ckpt")
    files = from_lightning(read_state(tmp_path / "file.ckpt"))
    return tmp_path / "back" / CheckpointStorage(tmp_path / "back").write(files)


# There and back


@pytest.mark.parametrize("by_determined", [False, True])
def test_ckpt_and_back_loses_nothing(by_determined: bool, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "storage", by_determined=by_determined)
    before, back = read_checkpoint(directory), there_and_back(directory, tmp_path)
    after = read_checkpoint(back)
    assert_equal(after.state, before.state)
    assert_equal(after.resume, before.resume)
    assert after.trial_state == before.trial_state
    assert after.epochs_known
    assert read_load_data(back) == read_load_data(directory) == LOAD_DATA
    # The versions of modules.
    versions, versions_after = ([w._metadata for w in one.state["models_state_dict"]] for one in (before, after))
    assert versions == versions_after
    assert versions[0]["1"] == to_lightning(before)["state_dict"]._metadata["models.0.1"] == {"version": 2}


# As written under DDP, by more models than there are digits.
TWELVE = [{f"module.models.{i}.weight": torch.tensor(i)} for i in range(12)]


@pytest.mark.parametrize("models", [[], [{}], [{}, {"weight": torch.ones(2)}, {}], [{"": torch.ones(1)}], TWELVE])
def test_models_and_names_do_not_change(models: list[dict[str, Any]], tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "storage", state={**make_state(), "models_state_dict": models})
    assert_equal(read_checkpoint(there_and_back(directory, tmp_path)).state["models_state_dict"], models)


def test_state_of_lightning_is_kept(tmp_path: Path) -> None:
    kept = {"callbacks": {"EarlyStopping": {"wait_count": 2}}, "loops": {"fit_loop": {}}, "mine": torch.ones(2)}
    directory = write_checkpoint(tmp_path / "storage", lightning=kept)
    for found in (
        to_lightning(read_checkpoint(directory)),
        read_checkpoint(there_and_back(directory, tmp_path)).lightning,
    ):
        assert found is not None
        assert_equal({name: found[name] for name in kept}, kept)


def test_unknown_epochs_stay_unknown(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "storage", by_determined=True)
    workload = {"trial_id": 3, "steps_completed": 40, "last_ckpt": 40, "step_id": 1, "last_val": 0}
    (directory / "workload_sequencer.pkl").write_bytes(pickle.dumps(workload))
    (directory / "trial_state.pkl").unlink()
    content = read_checkpoint(there_and_back(directory, tmp_path))
    assert not content.epochs_known
    assert content.trial_state.batches_trained == 40


# What Lightning finds


def test_ckpt_has_lightnings_entries(tmp_path: Path) -> None:
    content = read_checkpoint(write_checkpoint(tmp_path))
    ckpt = to_lightning(content)
    assert (ckpt["epoch"], ckpt["global_step"]) == (2, 14)
    assert ckpt["pytorch-lightning_version"] == version("pytorch-lightning")
    assert ckpt["hyper_parameters"] == LOAD_DATA["hparams"]
    assert_equal(ckpt["optimizer_states"], content.state["optimizers_state_dict"])
    assert_equal(ckpt["lr_schedulers"], content.state["lr_schedulers_state_dict"])
    assert ckpt[TRIAL_KEY]["load_data"] == LOAD_DATA
    assert ckpt[TRIAL_KEY]["name"] == content.name


def test_lightning_gets_no_schedulers_of_the_trials_own(tmp_path: Path) -> None:
    schedulers = [{"of_my_own": 1}, *make_state()["lr_schedulers_state_dict"]]
    state = {**make_state(), "lr_schedulers_state_dict": schedulers}
    ckpt = to_lightning(read_checkpoint(write_checkpoint(tmp_path, state=state)))
    assert_equal(ckpt["lr_schedulers"], schedulers[1:])
    assert_equal(ckpt[TRIAL_KEY]["state"]["lr_schedulers_state_dict"], schedulers)


def resumed_from(ckpt_path: Path) -> SmallTrial:
    module = TrialModule(SmallTrial)
    lightning.fit(module, ckpt_path, max_epochs=4)
    assert isinstance(module.trial, SmallTrial)
    return module.trial


@pytest.mark.parametrize(("batches", "by_determined"), [(5, False), (5, True), (14, True)])
def test_ckpt_resumes_like_directory(batches: int, by_determined: bool, tmp_path: Path) -> None:
    made_checkpoints.fit(tmp_path / "storage", batches)
    (name,) = CheckpointStorage(tmp_path / "storage").list_ids()
    checkpoint = tmp_path / "storage" / name
    if by_determined:
        (checkpoint / "resume.pth").unlink()
        forget_checksums(checkpoint)
    export_lightning(read_checkpoint(checkpoint), tmp_path / "file.ckpt")
    straight, converted = resumed_from(checkpoint), resumed_from(tmp_path / "file.ckpt")
    assert torch.equal(weights_of(converted), weights_of(straight))
    for mine, theirs in zip(converted.context.optimizers, straight.context.optimizers, strict=True):
        assert_equal(mine.state_dict(), theirs.state_dict())
    assert converted.counter.epochs == straight.counter.epochs


def test_lightning_file_resumes(tmp_path: Path) -> None:
    module = TrialModule(SmallTrial, hparams={"lr": 0.1})
    lightning.fit(module, max_epochs=2).save_checkpoint(tmp_path / "file.ckpt")
    files = from_lightning(read_state(tmp_path / "file.ckpt"))
    assert files.trial_class == "tests.trials:SmallTrial"
    assert files.load_data is not None
    assert read_settings(files.resume, files.load_data)["hparams"] == {"lr": 0.1}
    imported = tmp_path / CheckpointStorage(tmp_path).write(files)
    assert torch.equal(weights_of(resumed_from(imported)), weights_of(resumed_from(tmp_path / "file.ckpt")))


def test_file_of_another_module_is_refused() -> None:
    with pytest.raises(errors.InvalidCheckpointException, match="is not a TrialModule"):
        from_lightning({"state_dict": {"weight": torch.ones(1)}, "global_step": 8, "epoch": 1})


# What is wrong is named


def entry(**changes: Any) -> dict[str, Any]:
    return {"state": {}, "extra": {"trial_state": {}}, "load_data": None, **changes}


@pytest.mark.parametrize(
    ("ckpt", "message"),
    [
        ({TRIAL_KEY: None}, "must be a dict with a dict 'state'; got None"),
        ({TRIAL_KEY: entry(load_data="x")}, "must be dicts: 'load_data' is 'x'"),
        ({TRIAL_KEY: entry(extra={})}, "hold the progress of the trial; got None"),
        ({TRIAL_KEY: entry(extra={"trial_state": {"x": 1}})}, "unexpected keyword argument 'x'"),
        ({TRIAL_KEY: entry(extra={"trial_state": {}, "settings": "{"})}, "must be JSON objects .*; got '{'"),
        ({TRIAL_KEY: {"state": {}, "trial_state": {}, "resume": 3}}, "must be dicts: 'resume' is 3"),
        ({TRIAL_KEY: {"state": {}, "trial_state": {}, "resume": {}}}, "'rng_states' is missing"),
        ({"state_dict": None}, "must have an entry 'state_dict'; got"),
        ({"state_dict": [1], "x": 2}, r"\['det_lightning', 'state_dict', 'x'\]"),
        ({"state_dict": {"models.1.x": 1}}, r"numbered from 0.* \[1\]"),
        ({"optimizer_states": 5}, "'optimizer_states' must be a list; got 5"),
    ],
)
def test_wrong_file_is_refused(ckpt: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.CheckpointError, match=message):
        from_lightning({"state_dict": {}, TRIAL_KEY: entry(), **ckpt})


@pytest.mark.parametrize("key", ["models_state_dict", "optimizers_state_dict", "lr_schedulers_state_dict"])
def test_state_without_lists_is_refused(key: str, tmp_path: Path) -> None:
    values: list[Any] = [None, {}, [1]]
    for value in values:
        content = read_checkpoint(write_checkpoint(tmp_path, state={**make_state(), key: value}))
        with pytest.raises(errors.InvalidCheckpointException, match=rf"state_dict\.pth.*'{key}'"):
            to_lightning(content)


# Plain weights


def content_with(model: dict[str, Any], folder: Path) -> CheckpointContent:
    """Return the content of a checkpoint with one model."""
    return read_checkpoint(write_checkpoint(folder, state={**make_state(), "models_state_dict": [model]}))


def test_weights_of_one_model_have_its_names(tmp_path: Path) -> None:
    state = make_state()["models_state_dict"][0]
    export_weights(content_with(state, tmp_path), tmp_path / "weights.pt")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert weights._metadata == state._metadata
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    model.load_state_dict(weights)
    assert_equal(model.state_dict(), state)


def test_safetensors_number_the_weights_of_several_models(tmp_path: Path) -> None:
    content = read_checkpoint(write_checkpoint(tmp_path))
    assert export_safetensors(content, tmp_path / "weights.safetensors") == []
    found = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    models = enumerate(content.state["models_state_dict"])
    expected = {f"models.{i}.{name}": value for i, model in models for name, value in model.items()}
    assert_equal({name: found[name] for name in expected}, expected)
    assert_equal(dict(to_weights(content)), expected)
    with safetensors.safe_open(tmp_path / "weights.safetensors", "pt") as file:
        header = file.metadata()
    assert (header["steps_completed"], header["trial_class"]) == ("7", "model_def:DigitsTrial")


def test_safetensors_separate_tensors(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    model = {"weight": weight, "tied": weight, "row": weight[0], "turned": weight.t(), "_extra_state": {"a": 1}}
    assert export_safetensors(content_with(model, tmp_path), tmp_path / "file") == ["_extra_state"]
    found = safetensors.torch.load_file(tmp_path / "file")
    del model["_extra_state"]
    assert_equal({name: found[name] for name in model}, model)


def test_sparse_tensor_is_no_safetensor(tmp_path: Path) -> None:
    content = content_with({"weight": torch.eye(3).to_sparse()}, tmp_path)
    with pytest.raises(errors.CheckpointError, match=r"cannot be written as safetensors.*sparse"):
        export_safetensors(content, tmp_path / "file")
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("export", [export_weights, export_safetensors, export_lightning])
def test_irreplaceable_file_stays(export: Any, tmp_path: Path) -> None:
    content = read_checkpoint(write_checkpoint(tmp_path / "storage"))
    for target in (tmp_path / "missing" / "file", tmp_path / "storage"):
        with pytest.raises(errors.StorageError, match=f"{target} cannot be written"):
            export(content, target)
    assert [path.name for path in tmp_path.iterdir()] == ["storage"]
