"""Lightning's checkpoint files of a TrialModule: what is in them, and runs that go on from them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.checkpoint.format.standard_values import with_own_types, with_plain_numbers, with_plain_values
from det_lightning.pytorch import samplers
from det_lightning.units import Batch
from tests.adapters import other_releases
from tests.adapters.training import resumes_exactly, trained
from tests.lightning import fit, pl
from tests.trials import EPOCH_LEN, SmallTrial, make_data, weights_of
from tests.versions import draws_dropout_as_torch_2_13_cpu

#: Written after 10 batches of SmallTrial, by the release before objects of numpy were left out.
WITH_NUMPY_OBJECTS = Path(__file__).parent / "files/numpy_objects.ckpt.gz"


class NumpyState(pytorch.PyTorchCallback):
    def __init__(self) -> None:
        self.values: Any = {"mean": np.float32(0.1), "all": [np.arange(6).reshape(2, 3)], "none": np.zeros(0)}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict


class NumpyTrial(SmallTrial):
    """Uses numbers and generators of numpy wherever a checkpoint may have them."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        for group in self.adam.param_groups:
            group["lr"] = np.float64(0.01)
        self.numpy_state = NumpyState()

    def build_training_data_loader(self) -> pytorch.DataLoader:
        data = make_data()
        order = samplers.ReproducibleShuffleSampler(torch.utils.data.SequentialSampler(data), seed=3)
        return pytorch.DataLoader(data, batch_size=8, sampler=order)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {**super().build_callbacks(), "numpy": self.numpy_state}


def test_ckpt_files_have_no_numpy_objects(tmp_path: Path) -> None:
    file = tmp_path / "new.ckpt"
    fit(TrialModule(NumpyTrial, {"lr": np.float64(0.1)}), limit_train_batches=3).save_checkpoint(file)
    assert torch.serialization.get_unsafe_globals_in_checkpoint(file) == []
    assert torch.load(file, weights_only=True)["hyper_parameters"] == {"lr": 0.1}
    values = trained(NumpyTrial, file, max_epochs=2).trial.numpy_state.values
    assert type(values["mean"]) is np.float32
    assert values["all"][0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert values["none"].dtype == np.float64


@pytest.mark.parametrize("saved_at", [4, 10])
def test_own_generators_resume_exactly(saved_at: int, tmp_path: Path) -> None:
    fit(TrialModule(NumpyTrial), max_steps=2 * saved_at).save_checkpoint(tmp_path / "saved.ckpt")
    assert resumes_exactly(tmp_path / "saved.ckpt", trial=NumpyTrial)


@pytest.fixture
def older_file(tmp_path: Path) -> Path:
    file = tmp_path / "older.ckpt"
    file.write_bytes(gzip.decompress(WITH_NUMPY_OBJECTS.read_bytes()))
    return file


def test_file_with_numpy_objects_resumes(older_file: Path) -> None:
    assert "numpy.ndarray" in torch.serialization.get_unsafe_globals_in_checkpoint(older_file)
    resumed, straight = trained(SmallTrial, older_file, max_epochs=2), trained(max_epochs=2)
    assert resumed.trial_run.state.batches_trained == 2 * EPOCH_LEN
    # Not to the bit: it may have been another machine.
    ends_alike = torch.allclose(weights_of(resumed.trial), weights_of(straight.trial), rtol=1e-4)
    assert ends_alike or not draws_dropout_as_torch_2_13_cpu()


# Values of numpy


@pytest.mark.parametrize(
    "value",
    [
        np.array(3.5),
        np.arange(12, dtype=">i4").reshape(3, 4).T,
        np.array(["a", "bc"]),
        np.array([True, False]),
        np.array(["2024-01-01"], dtype="datetime64[D]"),
        np.complex64(1 + 2j),
        np.random.RandomState(3).get_state(),
        {"state": np.random.default_rng(3).bit_generator.state},
    ],
)
def test_numpy_types_come_back(value: Any) -> None:
    plain = with_plain_values(value)
    assert "ndarray" not in repr(plain)
    np.testing.assert_equal(with_own_types(plain), value)
    assert type(with_own_types(plain)) is type(value)


def test_containers_without_numpy_stay() -> None:
    weights = torch.nn.Linear(1, 1).state_dict()
    nested: dict[str, Any] = {"weights": weights, "array": np.zeros(2)}
    nested["itself"] = nested
    assert with_plain_values(nested)["weights"] is weights
    assert isinstance(nested["array"], np.ndarray)
    assert with_plain_numbers([np.float64(0.5), "text"]) == [0.5, "text"]


@pytest.mark.parametrize(
    "damage",
    [
        {"numpy_dtype": "O"},
        {"numpy_dtype": "i4,i4"},
        {"numpy_dtype": 3},
        {"numpy_shape": [3]},
        {"numpy_shape": [-1]},
        {"numpy_content": torch.zeros(16)},
        {"numpy_content": torch.zeros(16, dtype=torch.uint8, device="meta")},
        {"numpy_content": torch.zeros(0, dtype=torch.uint8), "numpy_shape": [2**62, 4, 0]},
    ],
)
def test_a_damaged_description_of_an_array_is_named(damage: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidCheckpointException, match="The checkpoint is damaged: the value"):
        with_own_types({**with_plain_values(np.zeros(2)), **damage})


def test_file_saved_after_validations_resumes(tmp_path: Path) -> None:
    module = trained(max_epochs=2)
    module.trainer.validate(module, verbose=False)
    with pytest.raises(errors.CheckpointNotFound, match=r"missing\.ckpt"):
        module.trainer.validate(module, ckpt_path=tmp_path / "missing.ckpt")
    module.trainer.save_checkpoint(tmp_path / "saved.ckpt")
    resumed, straight = trained(SmallTrial, tmp_path / "saved.ckpt", max_epochs=3), trained(max_epochs=3)
    assert resumed.trainer.global_step == 3 * 2 * EPOCH_LEN
    assert torch.equal(weights_of(resumed.trial), weights_of(straight.trial))


def test_a_file_of_a_run_that_never_began(tmp_path: Path) -> None:
    class Failing(SmallTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            raise ValueError("of the trial")

    class Callback(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            raise ValueError("of a callback")

    for trial, origin in ((Failing, "of the trial"), (SmallTrial, "of a callback")):
        with pytest.raises(ValueError, match=origin):
            fit(TrialModule(trial), callbacks=[pl.callbacks.OnExceptionCheckpoint(tmp_path), Callback()])
        resumed = trained(SmallTrial, tmp_path / "on_exception.ckpt")
        assert resumed.trial_run.state.batches_trained == EPOCH_LEN


# Files of other releases


ARCHIVES = sorted(Path(__file__).parent.joinpath("files").glob("torch_*.tar.gz"))


@pytest.mark.parametrize("name", other_releases.NAMES)
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_checkpoint_of_another_release_resumes(archive: Path, name: str, tmp_path: Path) -> None:
    other_releases.unpack(archive, tmp_path)
    # To the bit on one machine; this may be another one.
    assert other_releases.difference(tmp_path / name) < 1e-5


# Files that were written before a validation was done


class Watched(TrialModule):
    """Notes after which batches a run validates."""

    validated_after: tuple[int, ...] = ()

    def on_validation_start(self) -> None:
        self.validated_after += (self.trial_run.state.batches_trained,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ({}, {}),
        ({}, {"val_check_interval": 0.5}),
        ({}, {"check_val_every_n_epoch": None, "val_check_interval": 5}),
        ({"validation_period": Batch(3)}, {}),
    ],
)
def test_resume_at_any_batch_validates_where_a_straight_run_does(
    arguments: dict[str, Any], flags: dict[str, Any], tmp_path: Path
) -> None:
    each_batch = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)  # a batch makes two steps
    straight = trained(Watched(SmallTrial, **arguments), max_epochs=2, callbacks=[each_batch], **flags)
    files = list(tmp_path.glob("*.ckpt"))
    assert len(files) == 2 * EPOCH_LEN
    for file in files:
        resumed = trained(Watched(SmallTrial, **arguments), file, max_epochs=2, **flags)
        saved_at = torch.load(file, weights_only=True)["global_step"] // 2
        assert [*resumed.validated_after] == [batch for batch in straight.validated_after if batch >= saved_at]
        assert torch.equal(weights_of(resumed.trial), weights_of(straight.trial))


def test_failed_validations_are_repeated(tmp_path: Path) -> None:
    class Failing(SmallTrial):
        fails = True

        def evaluate_batch(self, batch: Any) -> dict[str, Any]:
            if self.fails:
                raise ValueError("the validation fails")
            return super().evaluate_batch(batch)

    saving = pl.callbacks.OnExceptionCheckpoint(tmp_path)
    with pytest.raises(ValueError, match="the validation fails"):
        fit(TrialModule(Failing), callbacks=[saving])
    Failing.fails = False
    resumed = trained(Watched(Failing), saving.ckpt_path, max_epochs=3)
    assert resumed.validated_after == (EPOCH_LEN, 2 * EPOCH_LEN, 3 * EPOCH_LEN)
