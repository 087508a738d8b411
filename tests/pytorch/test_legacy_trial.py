"""A trial of the interface before Determined 0.12.13 runs as it is, and trains as if it was migrated by hand."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.pytorch._pytorch_trial import adapt_legacy_trial
from tests.lightning import trainer
from tests.trials import EPOCH_LEN, CountingCallback, SmallTrial, fit_trial, seed_everything, weights_of

Mode = pytorch.LRScheduler.StepMode
LENGTH = 2 * EPOCH_LEN + 3

pytestmark = pytest.mark.filterwarnings("ignore:.*on_before_optimizer_step, which is deprecated:FutureWarning")


class Recorder(CountingCallback):
    """Clips as trials did then, and keeps all metrics and learning rates."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__()
        self.context = context
        self.seen: list[Any] = []
        self.clipped = 0

    def on_before_optimizer_step(self, parameters: Iterable[Any]) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        self.clipped += 1

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        rates = [group["lr"] for group in self.context.get_optimizer().param_groups]
        self.seen.append((avg_metrics, batch_metrics, rates))

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.seen.append(dict(metrics))


def build_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return ((model(inputs) - targets) ** 2).mean()


class Common(pytorch.PyTorchTrial):
    """What did not change with the interface."""

    step_mode = Mode.STEP_EVERY_BATCH
    frequency = 1
    returns_tensor = False
    num_workers = 0
    context: pytorch.PyTorchTrialContext
    counter: Any
    build_training_data_loader: Any = SmallTrial.build_training_data_loader
    build_validation_data_loader: Any = SmallTrial.build_validation_data_loader

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        self.counter = Recorder(self.context)
        return {"recorder": self.counter}

    def evaluation_reducer(self) -> pytorch.Reducer:
        return pytorch.Reducer.MAX

    def metrics(self, loss: torch.Tensor, batch_idx: int, epoch_idx: int) -> Any:
        return loss if self.returns_tensor else {"loss": loss, "place": 10 * epoch_idx + batch_idx}


class Old(Common):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context

    def build_model(self) -> torch.nn.Module:
        return build_model()

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def create_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return pytorch.LRScheduler(scheduler, step_mode=self.step_mode, frequency=self.frequency)

    def train_batch(self, batch: Any, model: torch.nn.Module, epoch_idx: int, batch_idx: int) -> Any:
        return self.metrics(loss_of(model, batch) * (1 + 0.1 * self.counter.epochs), batch_idx, epoch_idx)

    def evaluate_batch(self, batch: Any, model: torch.nn.Module) -> Any:
        return {"validation_loss": loss_of(model, batch)}


class Migrated(Common):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(build_model())
        self.sgd = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9))
        context.wrap_lr_scheduler(torch.optim.lr_scheduler.StepLR(self.sgd, 2, 0.7), self.step_mode, self.frequency)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = loss_of(self.model, batch) * (1 + 0.1 * self.counter.epochs)
        self.context.backward(loss)
        self.context.step_optimizer(self.sgd)
        return self.metrics(loss, batch_idx, epoch_idx)

    def evaluate_batch(self, batch: Any) -> Any:
        return {"validation_loss": loss_of(self.model, batch)}


def varied(trial_class: type[Common], **attributes: Any) -> type[Common]:
    return type(trial_class.__name__, (trial_class,), attributes)


#: Attributes of a trial that does not override ``evaluate_batch``.
NO_EVALUATION = {"evaluate_batch": pytorch.PyTorchTrial.evaluate_batch}


PERIODS: dict[str, Any] = {"validation_period": pytorch.Batch(5), "reporting_period": pytorch.Batch(1)}


def fit_with_determineds_trainer(
    trial_class: type[Common], aggregation_frequency: int = 1, max_length: int = LENGTH, seed: int = 3, **fit: Any
) -> Any:
    seed_everything(seed)
    arguments = {"checkpoint_policy": "none", "checkpoint_storage": "storage", "exp_conf": None, **PERIODS, **fit}
    arguments["max_length"] = pytorch.Batch(max_length)
    return fit_trial(trial_class, aggregation_frequency=aggregation_frequency, **arguments)


def fit_with_lightnings_trainer(trial_class: type[Common], aggregation_frequency: int = 1, **flags: Any) -> Any:
    seed_everything()
    length = pytorch.Batch(LENGTH)
    module = TrialModule(trial_class, aggregation_frequency=aggregation_frequency, max_length=length, **PERIODS)
    trainer(**{"max_epochs": -1, **flags}).fit(module)
    return module.trial


@functools.cache
def migrated() -> Any:
    return fit_with_determineds_trainer(Migrated)


def assert_same_training(old: Any, migrated: Any) -> None:
    assert torch.equal(weights_of(old), weights_of(migrated))
    np.testing.assert_equal(old.counter.seen, migrated.counter.seen)
    assert old.counter.seen
    for mine, theirs in zip(old.context.optimizers, migrated.context.optimizers, strict=True):
        assert str(mine.state_dict()) == str(theirs.state_dict())


# The same training as after a migration by hand


@pytest.mark.parametrize("fit", [fit_with_determineds_trainer, fit_with_lightnings_trainer])
@pytest.mark.parametrize(
    ("aggregation", "variation"),
    [
        (1, {}),
        (1, {"frequency": 4}),
        (1, {"step_mode": Mode.MANUAL_STEP, "returns_tensor": True}),
        (2, {"step_mode": Mode.STEP_EVERY_EPOCH, "returns_tensor": True}),
        (2, {"step_mode": Mode.STEP_EVERY_OPTIMIZER_STEP}),
    ],
)
def test_trains_like_the_migrated(fit: Callable[..., Any], aggregation: int, variation: dict[str, Any]) -> None:
    old = fit(varied(Old, **variation), aggregation)
    assert_same_training(old, fit(varied(Migrated, **variation), aggregation))
    assert isinstance(old, Old)
    assert old.counter.clipped == LENGTH // aggregation


def test_full_datasets_are_evaluated_like_the_migrated() -> None:
    def evaluate_full_dataset(trial: Any, data_loader: Any, model: Any = None) -> Any:
        return {"validation_loss": sum(loss_of(model or trial.model, batch) for batch in data_loader)}

    methods = {**NO_EVALUATION, "evaluate_full_dataset": evaluate_full_dataset}
    old, new = (fit_with_determineds_trainer(varied(trial_class, **methods)) for trial_class in (Old, Migrated))
    assert_same_training(old, new)


def test_methods_are_called_with_keywords_in_the_right_mode() -> None:
    class Keywords(Old):
        def train_batch(self, **arguments: Any) -> Any:
            assert sorted(arguments) == ["batch", "batch_idx", "epoch_idx", "model"]
            assert arguments["model"].training
            return super().train_batch(**arguments)

        def evaluate_batch(self, *, model: torch.nn.Module, batch: Any) -> dict[str, Any]:
            assert not model.training
            assert not torch.is_grad_enabled()
            return super().evaluate_batch(batch, model)

    assert_same_training(fit_with_determineds_trainer(Keywords), migrated())


def test_a_second_run_keeps_the_model() -> None:
    def fit_twice(trial_class: type[Common]) -> Any:
        seed_everything()
        with pytorch.init(enable_tensorboard_logging=False) as context:
            trial = trial_class(context)
            for length in (4, 9):
                trainer = pytorch.Trainer(trial, context, enable_progress_bar=False)
                trainer.fit(max_length=pytorch.Batch(length), checkpoint_policy="none")
        return trial

    with pytest.warns(FutureWarning, match="on_before_optimizer_step"):
        old, new = fit_twice(Old), fit_twice(Migrated)
    assert_same_training(old, new)
    assert len(old.context.models) == len(old.context.optimizers) == len(old.context.lr_schedulers) == 1


# Checkpoints


@pytest.mark.parametrize(("stop_after", "aggregation"), [(3, 2), (EPOCH_LEN, 1)])
def test_a_resumed_run_ends_bit_equal(stop_after: int, aggregation: int, tmp_path: Path) -> None:
    straight = fit_with_determineds_trainer(Old, aggregation)
    fit_with_determineds_trainer(Old, aggregation, max_length=stop_after, checkpoint_storage=tmp_path)
    latest: dict[str, Any] = {"checkpoint_storage": tmp_path, "latest_checkpoint": "last"}
    resumed = fit_with_determineds_trainer(Old, aggregation, seed=99, **latest)
    assert torch.equal(weights_of(resumed), weights_of(straight))
    assert str(resumed.context.get_optimizer().state_dict()) == str(straight.context.get_optimizer().state_dict())
    assert resumed.context.get_lr_scheduler().state_dict() == straight.context.get_lr_scheduler().state_dict()


def test_checkpoints_name_the_class(tmp_path: Path) -> None:
    fit_with_determineds_trainer(Old, checkpoint_storage=tmp_path / "one")
    fit_with_lightnings_trainer(Old, callbacks=[DeterminedCheckpoint(tmp_path / "two", policy="none")])
    for load_data in tmp_path.glob("*/*/load_data.json"):
        assert json.loads(load_data.read_text())["trial_cls_spec"] == f"{Old.__module__}:Old"
    assert len(list(tmp_path.glob("*/*/load_data.json"))) == 2


# Telling the interfaces apart


class OwnBuilders(Migrated):
    """Of today's interface, with methods of its own that have the old names."""

    build_model = optimizer = create_lr_scheduler = Common.get_batch_length


def train_with_optional_model(self: Any, batch: Any, epoch_idx: int, batch_idx: int, model: Any = None) -> Any:
    assert model is None
    return Migrated.train_batch(self, batch, epoch_idx, batch_idx)


def train_with_any_arguments(self: Any, *args: Any, **kwargs: Any) -> Any:
    return Migrated.train_batch(self, *args, **kwargs)


@pytest.mark.parametrize("train", [Migrated.train_batch, train_with_optional_model, train_with_any_arguments])
def test_a_wrapping_trial_is_no_legacy_trial(train: Any) -> None:
    trial = fit_with_determineds_trainer(varied(OwnBuilders, train_batch=train))
    assert_same_training(trial, migrated())
    assert adapt_legacy_trial(trial, trial.context) is trial


# Errors


def wrap_as_well(trial: Any, context: pytorch.PyTorchTrialContext) -> None:
    trial.context = context
    context.wrap_model(build_model())


def schedule_another_optimizer(trial: Any, optimizer: torch.optim.Optimizer) -> Any:
    return Old.create_lr_scheduler(trial, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))


@pytest.mark.parametrize(
    ("method", "returns", "message"),
    [
        ("train_batch", {"loss": 1.0}, r"context.backward\(\) takes the loss as a tensor with its graph; got 1.0"),
        ("evaluate_batch", None, r"Old.evaluate_batch\(\) must return a dict"),
        ("evaluate_full_dataset", None, r"Old.evaluate_full_dataset\(\) must return a dict"),
        ("create_lr_scheduler", 2, r"LRScheduler\(scheduler, step_mode=.*STEP_EVERY_EPOCH.*got a int"),
    ],
)
def test_wrong_results_are_named(method: str, returns: Any, message: str) -> None:
    evaluation = NO_EVALUATION if method == "evaluate_full_dataset" else {}
    with pytest.raises(TypeError, match=message):
        fit_with_determineds_trainer(varied(Old, **evaluation, **{method: lambda self, *_, **__: returns}))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (NO_EVALUATION, "Old must override exactly one .*overrides neither"),
        ({"evaluate_full_dataset": print}, "Old must .* overrides evaluate_batch and evaluate_full_dataset"),
        ({"create_lr_scheduler": schedule_another_optimizer}, r"got an optimizer \(SGD\) that was not wrapped"),
        ({"optimizer": None}, r"Old.train_batch\(\) takes a model.*does not define optimizer\(\)"),
        (
            {"build_model": None, "optimizer": None, **NO_EVALUATION},
            r"does not define build_model\(\) and optimizer\(\).*no wrapped model.*no wrapped optimizer.*neither",
        ),
        ({"__init__": wrap_as_well}, "Old.*wraps nothing, but something is wrapped already"),
    ],
)
def test_incomplete_trials_are_refused(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidExperimentException, match=message):
        fit_with_determineds_trainer(varied(Old, **attributes))


@pytest.mark.slow
def test_mixed_precision_of_the_configuration_applies() -> None:
    def configured(level: str) -> dict[str, Any]:
        return {"optimizations": {"mixed_precision": level}}

    plain = fit_with_determineds_trainer(Old, exp_conf=configured("O0"))
    assert torch.equal(weights_of(plain), weights_of(migrated()))
    halved = weights_of(fit_with_determineds_trainer(Old, exp_conf=configured("O2")))
    assert not torch.equal(halved, weights_of(plain))
    torch.testing.assert_close(halved.float(), weights_of(plain), rtol=0.05, atol=0.02)
    with pytest.raises(errors.ConfigError, match=r"mixed_precision: must be 'O0', 'O1', 'O2' or 'O3'; got 'O4'"):
        fit_with_determineds_trainer(Old, exp_conf=configured("O4"))
