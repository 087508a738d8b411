"""Trials without a run: modules from checkpoints, predictions, evaluation of data that a call gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from det_lightning import errors, pytorch
from det_lightning.adapters import DeterminedCheckpointIO, TrialModule
from det_lightning.adapters.strategies import PerModelDDPStrategy
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointReading
from det_lightning.checkpoint.format.lightning_file import from_lightning, to_lightning
from det_lightning.ranks.topology import free_port
from tests.adapters.test_ckpt_files import older_file
from tests.adapters.training import Predicting, Trial, trained
from tests.lightning import BoringModel, fit, pl, trainer
from tests.trials import SmallTrial, make_data, weights_of

__all__ = ["older_file"]

INPUTS, TARGETS = make_data().tensors
ROWS: Any = INPUTS


class OneModel(Trial):
    """Has a single model, whose width is a hyperparameter."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context, self.make_model(context.get_hparam("width")))

    def make_model(self, width: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 1))


@pytest.fixture(scope="module", params=["a file of Lightning", "a directory of Determined"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrialModule, str]:
    """Return a module that was trained, and its checkpoint."""
    module, tmp_path = TrialModule(OneModel, {"width": 3}), tmp_path_factory.mktemp("saved")
    if request.param == "a file of Lightning":
        fit(module).save_checkpoint(tmp_path / "saved.ckpt")
        return module, str(tmp_path / "saved.ckpt")
    writer = DeterminedCheckpoint(tmp_path, policy="none", code_dir=Path(__file__).parent / "files")
    fit(module, callbacks=[writer])
    return module, str(writer.last_checkpoint_path)


# Modules from checkpoints


def test_module_loads_without_a_trainer(saved: tuple[TrialModule, str]) -> None:
    trained, path = saved
    for weights_only in (None, True):
        module = TrialModule.load_from_checkpoint(path, "cpu", trial=OneModel, weights_only=weights_only)
        assert torch.equal(weights_of(module.trial), weights_of(trained.trial))
        assert module.hparams == {"width": 3}
        module.eval()
        assert torch.equal(module(INPUTS), trained.eval()(INPUTS))


def test_given_hparams_come_first(saved: tuple[TrialModule, str], tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidCheckpointException, match=r"does not fit the trial: [^\\]*size mismatch"):
        TrialModule.load_from_checkpoint(saved[1], trial=OneModel, hparams={"width": 4})
    (tmp_path / "hparams.yaml").write_text("width: 3\nextra: 5\n")
    module = TrialModule.load_from_checkpoint(saved[1], trial=OneModel, hparams_file=tmp_path / "hparams.yaml")
    assert module.hparams == {"width": 3, "extra": 5}


def test_a_trainer_uses_loaded_weights(saved: tuple[TrialModule, str]) -> None:
    trained, path = saved
    expected = trainer().validate(trained, verbose=False)
    assert trainer().validate(TrialModule.load_from_checkpoint(path, trial=OneModel), verbose=False) == expected
    finetuned = TrialModule.load_from_checkpoint(path, trial=OneModel)
    with torch.no_grad():
        for parameter in finetuned.parameters():
            parameter.zero_()
    fit(finetuned, limit_train_batches=0)
    assert not weights_of(finetuned.trial).any()
    fit(finetuned)
    assert weights_of(finetuned.trial).any()


def test_exp_conf_comes_from_the_checkpoint(tmp_path: Path) -> None:
    configuration = {"name": "first", "hyperparameters": {"width": 2}}
    fit(TrialModule(OneModel, exp_conf=configuration)).save_checkpoint(tmp_path / "saved.ckpt")
    module = TrialModule.load_from_checkpoint(tmp_path / "saved.ckpt", trial=OneModel)
    assert module.trial.context.get_experiment_config()["name"] == "first"


def test_subclass_loads_with_its_saved_arguments(tmp_path: Path) -> None:
    class Module(TrialModule):
        def __init__(self, size: int = 1, name: str = "default") -> None:
            super().__init__(OneModel, {"width": size})
            self.save_hyperparameters()
            self.name = name

    fit(Module(3, "mine")).save_checkpoint(tmp_path / "saved.ckpt")
    loaded = Module.load_from_checkpoint(tmp_path / "saved.ckpt")
    assert (loaded.name, loaded.hparams) == ("mine", {"width": 3, "size": 3, "name": "mine"})
    assert Module.load_from_checkpoint(tmp_path / "saved.ckpt", name="other").name == "other"


class Adjustable(TrialModule):
    """A module that takes arguments of TrialModule, and one of its own with the name of a hyperparameter."""

    def __init__(self, width: int = 1, trusted: bool = False, keeps: bool = False) -> None:
        super().__init__(OneModel, {"width": 3}, reading=CheckpointReading(trusted))
        self.given = width, trusted
        if keeps:
            self.save_hyperparameters(ignore=["keeps"])


@pytest.mark.parametrize(("keeps", "expected"), [(False, 1), (True, 7)])
def test_a_file_supplies_only_added_arguments(keeps: bool, expected: int, tmp_path: Path) -> None:
    fit(Adjustable(7, trusted=True, keeps=keeps)).save_checkpoint(tmp_path / "saved.ckpt")
    assert Adjustable.load_from_checkpoint(tmp_path / "saved.ckpt").given == (expected, False)
    (tmp_path / "hparams.yaml").write_text("{width: 9, trusted: true}")
    loaded = Adjustable.load_from_checkpoint(tmp_path / "saved.ckpt", hparams_file=tmp_path / "hparams.yaml")
    assert loaded.given == (9, False)


class WithScale(TrialModule):
    def __init__(self, scale: float = 0.0) -> None:
        super().__init__(OneModel, {"width": 3})
        self.scale = torch.nn.Parameter(torch.tensor(scale))


@pytest.mark.parametrize("plugins", [[], [DeterminedCheckpointIO(code_dir=Path(__file__).parent / "files")]])
def test_own_parameters_come_back(plugins: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    fit(WithScale(2.0), plugins=plugins).save_checkpoint(path)
    resumed, validated, loaded = WithScale(), WithScale(), WithScale.load_from_checkpoint(path)
    trainer(max_epochs=2).fit(resumed, ckpt_path=path)
    trainer().validate(validated, ckpt_path=path, verbose=False)
    assert [module.scale.item() for module in (resumed, validated, loaded)] == [2.0, 2.0, 2.0]


def test_own_parameters_are_exported() -> None:
    module = WithScale(2.0)
    content = from_lightning(fit(module)._checkpoint_connector.dump_checkpoint())
    assert {name: value.tolist() for name, value in to_lightning(content)["state_dict"].items()} == {
        name: value.tolist() for name, value in module.state_dict().items()
    }


def test_unknown_parameters_need_strict_false(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    fit(WithScale(2.0)).save_checkpoint(path)
    module = TrialModule(OneModel, {"width": 3})
    refusal = r'Unexpected key\(s\) in state_dict: "scale"[\s\S]*strict=False, or strict_loading = False'
    with pytest.raises(errors.InvalidCheckpointException, match=refusal):
        TrialModule.load_from_checkpoint(path, trial=OneModel)
    with pytest.raises(errors.InvalidCheckpointException, match=refusal):
        trainer(max_epochs=2).fit(module, ckpt_path=path)
    TrialModule.load_from_checkpoint(path, trial=OneModel, strict=False)
    module.strict_loading = False
    trainer(max_epochs=2).fit(module, ckpt_path=path)


def test_weights_of_distributed_training_load() -> None:
    module = WithScale(2.0)
    fit(module)
    weights = {name.replace("models.0.", "models.0.module."): value for name, value in module.state_dict().items()}
    scale = weights.pop("scale")
    with pytest.raises(errors.InvalidCheckpointException, match=r'Missing key.*"scale"'):
        WithScale().load_state_dict(weights)
    other = WithScale()
    assert other.load_state_dict({**weights, "more": weights}, strict=False) == (["scale"], ["more"])
    other.load_state_dict(weights, strict=False, assign=True)
    assert other.trial.model[0].weight.data_ptr() == weights["models.0.module.0.weight"].data_ptr()
    built = WithScale()
    built.load_state_dict({**weights, "scale": scale})
    assert trainer().validate(built, verbose=False) == trainer().validate(module, verbose=False)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_spawn")
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_spawned_processes_return_weights(start_method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    module = TrialModule(SmallTrial, {"global_batch_size": 16})
    checkpoints = pl.callbacks.ModelCheckpoint(tmp_path)
    trainer([checkpoints], devices=2, strategy=PerModelDDPStrategy(start_method=start_method)).fit(module)
    loaded = TrialModule.load_from_checkpoint(checkpoints.best_model_path, trial=SmallTrial)
    assert torch.equal(weights_of(module.trial), weights_of(loaded.trial))


def test_missing_parameters_need_strict_false(saved: tuple[TrialModule, str]) -> None:
    class Larger(OneModel):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.model.add_module("more", torch.nn.Linear(1, 1))

    with pytest.raises(errors.InvalidCheckpointException, match="Missing key"):
        TrialModule.load_from_checkpoint(saved[1], trial=Larger)
    module = TrialModule.load_from_checkpoint(saved[1], trial=Larger, strict=False)
    count = len(weights_of(saved[0].trial))
    assert torch.equal(weights_of(module.trial)[:count], weights_of(saved[0].trial))


def test_loading_failures_are_explained(saved: tuple[TrialModule, str], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"from_checkpoint\(path, trial=...\) needs the class .* by tests.*OneModel"):
        TrialModule.load_from_checkpoint(saved[1])
    fit(BoringModel(), limit_train_batches=1).save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(errors.InvalidCheckpointException, match=r"was not written by a TrialModule"):
        TrialModule.load_from_checkpoint(tmp_path / "other.ckpt", trial=OneModel)
    with pytest.raises(FileNotFoundError, match=r"missing\.ckpt"):
        TrialModule.load_from_checkpoint(tmp_path / "missing.ckpt", trial=OneModel)
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        saved[0].load_from_checkpoint(saved[1], trial=OneModel)


# Predictions


def predict(module: TrialModule, data: Any, **arguments: Any) -> list[Any]:
    return trainer().predict(module, data, **arguments) or []


def loader(*tensors: torch.Tensor) -> Any:
    return torch.utils.data.DataLoader(TensorDataset(*tensors), batch_size=20)


def test_one_model_predicts() -> None:
    for data in (
        loader(INPUTS),
        loader(INPUTS, TARGETS),
        torch.utils.data.DataLoader(ROWS, batch_size=20),
        torch.utils.data.DataLoader(ROWS, batch_size=20, collate_fn=np.stack),
        pytorch.DataLoader(make_data(), batch_size=20),
    ):
        module = TrialModule(OneModel, {"width": 3})
        predictions = predict(module, data)
        model = module.eval().trial.model
        expected = [model(batch) for batch in INPUTS.split(20)]  # the last bit may depend on the size of the batch
        assert [prediction.tolist() for prediction in predictions] == [one.tolist() for one in expected], data
        assert torch.equal(module(INPUTS), model(INPUTS))


def test_predict_batch_predicts(tmp_path: Path) -> None:
    module = TrialModule(Predicting)
    fit(module).save_checkpoint(tmp_path / "saved.ckpt")
    trial = module.eval().trial
    for predicting in (module, TrialModule(Predicting)):
        predictions = predict(predicting, loader(INPUTS), ckpt_path=tmp_path / "saved.ckpt")
        assert len(predictions) == 3
        assert all(map(torch.equal, predictions, [trial.head(trial.body(batch)) for batch in INPUTS.split(20)]))
    loaded = TrialModule.load_from_checkpoint(tmp_path / "saved.ckpt", trial=Predicting).eval()
    assert torch.equal(loaded([INPUTS]), trial.head(trial.body(INPUTS)))


def test_predict_batch_may_take_the_index() -> None:
    class Trial(SmallTrial):
        def predict_batch(self, batch: Any, batch_idx: int) -> int:
            return batch_idx

    assert trainer().predict(TrialModule(Trial), loader(INPUTS)) == [0, 1, 2]


def test_predict_and_test_between_two_fits_change_nothing() -> None:
    module = trained(Predicting)
    trainer().predict(module, loader(INPUTS))
    trainer().test(module, loader(INPUTS, TARGETS), verbose=False)
    assert torch.equal(weights_of(trained(module).trial), weights_of(trained(trained(Predicting)).trial))


def test_several_models_need_predict_batch() -> None:
    module = TrialModule(SmallTrial)
    refusal = r"SmallTrial wraps 2 models.*define predict_batch\(self, batch\)"
    with pytest.raises(errors.InvalidExperimentException, match=refusal):
        trainer().predict(module, loader(INPUTS))
    with pytest.raises(errors.InvalidExperimentException, match=refusal):
        module(INPUTS)
    with pytest.raises(errors.InternalException, match=r"The trial is not built yet: .*load_from_checkpoint"):
        TrialModule(OneModel, {"width": 3})(INPUTS)


# Evaluation of given data


def test_given_data_are_evaluated() -> None:
    module = trained()
    expected = trainer().validate(module, verbose=False)
    same = torch.utils.data.DataLoader(make_data(), batch_size=16)
    assert trainer().test(module, same, verbose=False) == expected
    assert trainer().test(module, loader(INPUTS[:3], TARGETS[:3]), verbose=False) != expected


def test_reducers_work_in_a_test() -> None:
    class Trial(OneModel):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.count = context.wrap_reducer(sum, name="samples")

        def evaluate_batch(self, batch: Any) -> dict[str, Any]:
            self.count.update(len(batch[0]))
            return {"largest": batch[0].max(), "smallest": batch[0].min()}

        def evaluation_reducer(self) -> dict[str, pytorch.Reducer]:
            return {"largest": pytorch.Reducer.MAX, "smallest": pytorch.Reducer.MIN}

    (metrics,) = trainer().test(TrialModule(Trial, {"width": 1}), loader(INPUTS), verbose=False)
    assert metrics == {"largest": INPUTS.max().item(), "smallest": INPUTS.min().item(), "samples": len(INPUTS)}


def test_given_dataset_is_evaluated_as_a_whole() -> None:
    class Trial(OneModel):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch  # type: ignore[assignment]

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return {"sum": np.float64(sum(batch[0].sum().item() for batch in data_loader))}

    (metrics,) = trainer().test(TrialModule(Trial, {"width": 1}), loader(INPUTS), verbose=False)
    assert metrics["sum"] == pytest.approx(INPUTS.sum().item(), rel=1e-4)


def test_data_module_gives_data_for_test_and_predict() -> None:
    class Data(pl.LightningDataModule):
        def test_dataloader(self) -> Any:
            return loader(INPUTS, TARGETS)

        predict_dataloader = test_dataloader

    module = TrialModule(OneModel, {"width": 3})
    assert trainer().test(module, datamodule=Data(), verbose=False)[0].keys() == {"validation_loss"}
    assert len(trainer().predict(module, datamodule=Data()) or []) == 3


def test_calls_need_one_loader() -> None:
    for call, data, refusal in (
        ("test", None, r"^test\(\) of a trial needs data: pass dataloaders=, or use validate"),
        ("predict", None, r"^predict\(\) of a trial needs data: pass dataloaders="),
        ("test", [loader(INPUTS, TARGETS)] * 2, r"got a list of loaders.*call validate\(\) or test\(\) once for each"),
    ):
        with pytest.raises(errors.UnsupportedTrainerFlags, match=refusal):
            getattr(trainer(), call)(TrialModule(Predicting), data)
