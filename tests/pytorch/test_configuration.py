"""One source of truth: what a call does not say, its experiment configuration says, as on the platform."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import pytorch
from det_lightning.adapters import TrialModule
from det_lightning.checkpoint import CheckpointStorage
from det_lightning.config import read_config
from det_lightning.errors import ConfigError
from tests.lightning import trainer
from tests.trials import weights_of

CONFIG: dict[str, Any] = {
    "name": "counted",
    "entrypoint": "model_def:MyTrial",
    "hyperparameters": {"lr": 0.1, "global_batch_size": {"type": "const", "val": 4}},
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 8}},
    "min_validation_period": {"batches": 2},
    "perform_initial_validation": True,
    "scheduling_unit": 4,
    "optimizations": {"aggregation_frequency": 4},
    "reproducibility": {"experiment_seed": 7},
}

_NEVER = pytorch.Batch(1000)


class CountedTrial(pytorch.PyTorchTrial, pytorch.PyTorchCallback):
    """Batches of 4 records, 8 in an epoch; notes after how many batches a run validates and reports.

    The weights depend on the seed and on every update.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.batches = 0
        self.validations: list[int] = []
        self.reports: list[int] = []
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(torch.utils.data.TensorDataset(torch.arange(32.0).view(32, 1)), batch_size=4)

    build_validation_data_loader = build_training_data_loader

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"counted": self}

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.validations.append(self.batches)

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: Any) -> None:
        self.reports.append(len(batch_metrics))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.batches += 1
        loss = self.model(batch[0] / 32).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": 1 / (1 + self.batches)}


def in_file(folder: Path, config: dict[str, Any]) -> Path:
    """Write a configuration; JSON is YAML."""
    (folder / "const.yaml").write_text(json.dumps(config))
    return folder / "const.yaml"


def fitted(exp_conf: Any, init: dict[str, Any] | None = None, **fit: Any) -> CountedTrial:
    """Train with Determined's API; return the trial."""
    with pytorch.init(exp_conf=exp_conf, enable_tensorboard_logging=False, **(init or {})) as context:
        trial = CountedTrial(context)
        pytorch.Trainer(trial, context, enable_progress_bar=False).fit(**fit)
    return trial


def by_lightning(exp_conf: Any, module: dict[str, Any] | None = None, **flags: Any) -> CountedTrial:
    """Train with Lightning's API; return the trial."""
    lightning_module: Any = TrialModule(CountedTrial, exp_conf=exp_conf, **(module or {}))
    trainer(**{"max_epochs": None, "devices": 1, **flags}).fit(lightning_module)
    trial: CountedTrial = lightning_module.trial
    return trial


def outcome(trial: CountedTrial) -> tuple[int, list[int], list[int]]:
    """Return the number of updates, the batches before each validation, and the length of each workload."""
    return trial.context.optimizer_steps, trial.validations, trial.reports


def checkpoints() -> list[int]:
    """Return the number of batches of each checkpoint, where Determined puts those of local runs by default."""
    storage = CheckpointStorage()
    return sorted(storage.info(name).metadata["steps_completed"] for name in storage.list_ids())


@pytest.mark.parametrize("form", [dict, Path, str])
@pytest.mark.parametrize("train", [fitted, by_lightning])
def test_trains_as_on_the_platform(train: Any, form: Any, tmp_path: Path) -> None:
    trial = train(CONFIG if form is dict else form(in_file(tmp_path, CONFIG)))
    assert outcome(trial) == (2, [0, 2, 4, 6, 8], [2, 2, 2, 2])


FOUR_BATCHES = pytorch.Batch(4)


@pytest.mark.parametrize(
    ("train", "said", "result"),
    [
        (fitted, {"init": {"aggregation_frequency": 1}, "step_zero_validation": False}, (8, [2, 4, 6, 8], [2] * 4)),
        (fitted, {"max_length": FOUR_BATCHES, "reporting_period": pytorch.Batch(1)}, (1, [0, 2, 4], [1] * 4)),
        (fitted, {"validation_period": pytorch.Batch(8)}, (2, [0, 8], [4, 4])),
        (
            by_lightning,
            {"module": {"aggregation_frequency": 1, "step_zero_validation": False}},
            (8, [2, 4, 6, 8], [2] * 4),
        ),
        (by_lightning, {"module": {"max_length": FOUR_BATCHES}, "log_every_n_steps": 1}, (1, [0, 2, 4], [1] * 4)),
        (by_lightning, {"max_epochs": 2}, (4, [0, 2, 4, 6, 8, 10, 12, 14, 16], [2] * 8)),
        (by_lightning, {"max_steps": 1}, (1, [0, 2, 4], [2, 2])),
        (by_lightning, {"val_check_interval": 4}, (2, [0, 4, 8], [4, 4])),
    ],
)
def test_arguments_beat_the_configuration(train: Any, said: dict[str, Any], result: Any) -> None:
    assert outcome(train(CONFIG, **said)) == result


def test_run_without_periods_validates_at_its_end() -> None:
    assert outcome(fitted(None, max_length=pytorch.Batch(8))) == (8, [8], [8])
    assert outcome(fitted({"searcher": {"max_length": {"epochs": 2}}})) == (16, [16], [16])


@pytest.mark.slow
def test_the_experiments_seed_is_the_trials() -> None:
    first, again, other = (fitted({**CONFIG, "reproducibility": {"experiment_seed": seed}}) for seed in (7, 7, 8))
    assert torch.equal(weights_of(first), weights_of(again))
    assert not torch.equal(weights_of(first), weights_of(other))
    assert (first.context.get_trial_seed(), other.context.get_trial_seed()) == (7, 8)
    with pytorch.init(exp_conf=CONFIG, trial_seed=8, enable_tensorboard_logging=False) as context:
        assert context.get_trial_seed() == 8


@pytest.mark.parametrize(
    ("section", "said", "saved"),
    [
        ({"checkpoint_policy": "all"}, {}, [2, 4, 6, 8]),
        ({"checkpoint_policy": "none", "min_checkpoint_period": {"records": 12}}, {}, [3, 6, 8]),
        ({"checkpoint_policy": "all"}, {"checkpoint_policy": "none"}, [8]),
        ({"checkpoint_policy": "none", "min_checkpoint_period": {"batches": 1}}, {"checkpoint_period": _NEVER}, [8]),
        ({"checkpoint_policy": "all", "checkpoint_storage": {"save_trial_best": 0}}, {}, [8]),
        ({"searcher": {**CONFIG["searcher"], "smaller_is_better": True}}, {}, [2, 4, 6, 8]),
        ({"searcher": {**CONFIG["searcher"], "smaller_is_better": False}}, {}, [2, 8]),
    ],
)
def test_checkpoints_follow_the_configuration(section: dict[str, Any], said: dict[str, Any], saved: list[int]) -> None:
    fitted({**CONFIG, "perform_initial_validation": False, **section}, **said)
    assert checkpoints() == saved


def test_a_call_overrides_the_storage(tmp_path: Path) -> None:
    section = {"type": "shared_fs", "host_path": str(tmp_path / "shared"), "storage_path": "mnist"}
    config = {**CONFIG, "checkpoint_policy": "none", "checkpoint_storage": section}
    fitted(config, checkpoint_storage=tmp_path / "named")
    assert len(CheckpointStorage(tmp_path / "named").list_ids()) == 1
    assert not (tmp_path / "shared").exists()
    fitted(config)
    assert len(CheckpointStorage(tmp_path / "shared" / "mnist").list_ids()) == 1


def test_all_mistakes_are_named() -> None:
    wrong = {
        "searcher": {"name": "pbt", "metric": "loss"},
        "min_validation_period": "often",
        "optimizations": {"aggregation_frequency": 0},
        "hyperparameters": {"lr": {"type": "double", "minval": 2, "maxval": 1}},
    }
    with pytest.raises(ConfigError) as caught, pytorch.init(exp_conf=wrong):
        pass
    paths = " ".join(mistake.path for mistake in caught.value.mistakes)
    assert paths == "hyperparameters.lr.maxval min_validation_period optimizations.aggregation_frequency searcher.name"
    with pytest.raises(ConfigError) as again:
        TrialModule(CountedTrial, exp_conf=wrong)
    assert str(again.value) == str(caught.value)


@pytest.mark.parametrize(
    "small",
    [
        {},
        {"name": "x", "hyperparameters": {"lr": 0.1, "layers": (1, 2)}},
        {"searcher": {"name": "adaptive_asha", "metric": "loss"}},
        {"searcher": {"name": "random", "metric": "loss", "max_length": 100}},
        {"data": {"loader": object()}, "searcher": None, "min_validation_period": {"records": 0}},
    ],
    ids=lambda small: "-".join(small) or "nothing",
)
def test_incomplete_configuration_trains(small: dict[str, Any]) -> None:
    trial = fitted(small, max_length=pytorch.Batch(2))
    assert outcome(trial) == (2, [2], [2])
    assert trial.context.get_experiment_config() is small


def test_idle_fields_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    searcher = {**CONFIG["searcher"], "name": "random", "max_trials": 4}
    config = {**CONFIG, "searcher": searcher, "resources": {"shm_size": 1, "slots_pre_trial": 2}, "mine": {"a": 1}}
    for train in (fitted, by_lightning):
        caplog.clear()
        train(config)
        (warning,) = [record.getMessage() for record in caplog.records if "no effect here" in record.getMessage()]
        misspelled = "resources.slots_pre_trial: unknown key; did you mean slots_per_trial?"
        for name in ("searcher.name", "searcher.max_trials", "resources.shm_size", "mine: unknown key", misspelled):
            assert name in warning
        for name in ("max_length", "min_validation_period", "entrypoint", "aggregation_frequency"):
            assert name not in warning
    caplog.clear()
    by_lightning({**CONFIG, "checkpoint_policy": "all", "min_checkpoint_period": {"batches": 1}})
    (warning,) = [record.getMessage() for record in caplog.records if "no effect here" in record.getMessage()]
    assert warning.endswith("no effect here: checkpoint_policy; min_checkpoint_period.")


@pytest.mark.slow
def test_no_warning_for_explicit_defaults(caplog: pytest.LogCaptureFixture) -> None:
    for train in (fitted, by_lightning):
        train(read_config(CONFIG).as_dict())
    assert "no effect" not in caplog.text


def test_a_call_overrides_hyperparameters() -> None:
    for given, expected in ((None, {"lr": 0.1, "global_batch_size": 4}), ({"lr": 1}, {"lr": 1})):
        with pytorch.init(exp_conf=CONFIG, hparams=given, enable_tensorboard_logging=False) as context:
            assert context.get_hparams() == expected


def test_a_file_gets_defaults_a_dict_does_not(tmp_path: Path) -> None:
    file = in_file(tmp_path, {"searcher": CONFIG["searcher"]})
    with pytorch.init(exp_conf=file, enable_tensorboard_logging=False) as context:
        seen = context.get_experiment_config()
    assert seen["searcher"]["smaller_is_better"] is True
    assert (seen["max_restarts"], seen["reproducibility"]) == (5, {"experiment_seed": 0})


def test_unusable_length_is_refused_if_needed() -> None:
    config = {"searcher": {"max_length": {"records": 8}}, "min_validation_period": {"records": 4}}
    with pytest.raises(ValueError, match=r"searcher.max_length .* without global_batch_size"):
        fitted(config, validation_period=pytorch.Batch(1))
    fitted(config, max_length=pytorch.Batch(2), validation_period=pytorch.Batch(1))
    with pytest.raises(ValueError, match="max_length"):
        fitted({"searcher": {"metric": "loss"}})


def test_uncopyable_values_reach_the_trial() -> None:
    lock = threading.Lock()
    with pytorch.init(exp_conf={"data": {"lock": lock}}, enable_tensorboard_logging=False) as context:
        assert context.get_data_config()["lock"] is lock
