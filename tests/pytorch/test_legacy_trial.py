"""A trial of the interface before Determined 0.12.13 runs as it is, and trains as if it was migrated by hand."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointStorage
from det_lightning.pytorch._legacy_trial import adapt_legacy_trial, is_legacy_trial, original_trial
from tests.trials import BATCH_SIZE, EPOCH_LEN, CountingCallback, make_data, seed_everything, weights_of

Mode = pytorch.LRScheduler.StepMode
LENGTH = 2 * EPOCH_LEN + 3


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
    returns_tensor = False
    context: pytorch.PyTorchTrialContext
    counter: Any

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(make_data(), batch_size=BATCH_SIZE, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(make_data(), batch_size=16)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        self.counter = Recorder(self.context)
        return {"recorder": self.counter}

    def evaluation_reducer(self) -> pytorch.Reducer:
        return pytorch.Reducer.MAX

    def metrics(self, loss: torch.Tensor, batch_idx: int, epoch_idx: int) -> Any:
        return loss if self.returns_tensor else {"loss": loss, "place": 10 * epoch_idx + batch_idx}


class OldWithoutEvaluation(Common):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context

    def build_model(self) -> torch.nn.Module:
        return build_model()

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def create_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> pytorch.LRScheduler | None:
        return pytorch.LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), step_mode=self.step_mode)

    def train_batch(self, batch: Any, model: torch.nn.Module, epoch_idx: int, batch_idx: int) -> Any:
        return self.metrics(loss_of(model, batch) * (1 + 0.1 * self.counter.epochs), batch_idx, epoch_idx)


class Old(OldWithoutEvaluation):
    def evaluate_batch(self, batch: Any, model: torch.nn.Module) -> dict[str, Any]:
        return {"validation_loss": loss_of(model, batch)}


class OldOnFullDataset(OldWithoutEvaluation):
    def evaluate_full_dataset(self, data_loader: Any, model: torch.nn.Module) -> dict[str, Any]:
        return {"validation_loss": sum(loss_of(model, batch) for batch in data_loader)}


class MigratedWithoutEvaluation(Common):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(build_model())
        self.sgd = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9))
        context.wrap_lr_scheduler(torch.optim.lr_scheduler.StepLR(self.sgd, 2, 0.7), self.step_mode)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = loss_of(self.model, batch) * (1 + 0.1 * self.counter.epochs)
        self.context.backward(loss)
        self.context.step_optimizer(self.sgd)
        return self.metrics(loss, batch_idx, epoch_idx)


class Migrated(MigratedWithoutEvaluation):
    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"validation_loss": loss_of(self.model, batch)}


class MigratedOnFullDataset(MigratedWithoutEvaluation):
    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return {"validation_loss": sum(loss_of(self.model, batch) for batch in data_loader)}


def fit_with_determineds_trainer(
    trial_class: type[Common],
    aggregation_frequency: int = 1,
    max_length: int = LENGTH,
    seed: int = 3,
    exp_conf: dict[str, Any] | None = None,
    **fit: Any,
) -> Any:
    seed_everything(seed)
    with pytorch.init(
        aggregation_frequency=aggregation_frequency, exp_conf=exp_conf, enable_tensorboard_logging=False
    ) as context:
        trial = trial_class(context)
        defaults = {"validation_period": pytorch.Batch(5), "reporting_period": pytorch.Batch(1)}
        arguments = {**defaults, "checkpoint_policy": "none", **fit}
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*on_before_optimizer_step, which is deprecated", FutureWarning)
            trainer.fit(max_length=pytorch.Batch(max_length), **arguments)
    return trial


def fit_with_lightnings_trainer(trial_class: type[Common], aggregation_frequency: int = 1, **flags: Any) -> Any:
    seed_everything()
    module = TrialModule(
        trial_class,
        aggregation_frequency=aggregation_frequency,
        max_length=pytorch.Batch(LENGTH),
        validation_period=pytorch.Batch(5),
        reporting_period=pytorch.Batch(1),
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(**{"accelerator": "cpu", "max_epochs": -1, "enable_model_summary": False, **quiet, **flags})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*on_before_optimizer_step, which is deprecated", FutureWarning)
        trainer.fit(module)
    return module.trial


def varied(trial_class: type[Common], **attributes: Any) -> type[Common]:
    return type(trial_class.__name__, (trial_class,), attributes)


def assert_same_training(old: Any, migrated: Any) -> None:
    assert torch.equal(weights_of(old), weights_of(migrated))
    np.testing.assert_equal(old.counter.seen, migrated.counter.seen)
    assert old.counter.seen
    for mine, theirs in zip(old.context.optimizers, migrated.context.optimizers, strict=True):
        assert str(mine.state_dict()) == str(theirs.state_dict())


# The same training as after a migration by hand


@pytest.mark.parametrize("fit", [fit_with_determineds_trainer, fit_with_lightnings_trainer])
@pytest.mark.parametrize("aggregation_frequency", [1, 2])
@pytest.mark.parametrize("step_mode", Mode)
@pytest.mark.parametrize("returns_tensor", [False, True])
def test_a_legacy_trial_trains_like_the_migrated(
    fit: Callable[..., Any], aggregation_frequency: int, step_mode: Mode, returns_tensor: bool
) -> None:
    variation = {"step_mode": step_mode, "returns_tensor": returns_tensor}
    old = fit(varied(Old, **variation), aggregation_frequency)
    assert_same_training(old, fit(varied(Migrated, **variation), aggregation_frequency))
    assert isinstance(old, Old)


@pytest.mark.parametrize("fit", [fit_with_determineds_trainer, fit_with_lightnings_trainer])
def test_full_datasets_like_the_migrated(fit: Callable[..., Any]) -> None:
    assert_same_training(fit(OldOnFullDataset), fit(MigratedOnFullDataset))


def test_the_schedulers_frequency() -> None:
    class Seldom(Old):
        def create_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> pytorch.LRScheduler:
            return pytorch.LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), Mode.STEP_EVERY_BATCH, 4)

    trial = fit_with_determineds_trainer(Seldom)
    assert trial.context.get_optimizer().param_groups[0]["lr"] == 0.05 * 0.5 ** (LENGTH // 4)


@pytest.mark.parametrize("create_lr_scheduler", [None, lambda self, optimizer: None])
def test_a_scheduler_is_optional(create_lr_scheduler: Any) -> None:
    trial = fit_with_determineds_trainer(varied(Old, create_lr_scheduler=create_lr_scheduler))
    assert trial.context.lr_schedulers == []
    assert trial.context.get_optimizer().param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("aggregation_frequency", [1, 2])
def test_clipping_callbacks(aggregation_frequency: int) -> None:
    class Unclipped(Old):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            self.counter = CountingCallback()
            return {"recorder": self.counter}

    clipped = fit_with_determineds_trainer(Old, aggregation_frequency)
    assert clipped.counter.clipped == LENGTH // aggregation_frequency
    unclipped = fit_with_determineds_trainer(Unclipped, aggregation_frequency)
    assert not torch.equal(weights_of(clipped), weights_of(unclipped))


def test_keywords_and_modes() -> None:
    class Keywords(Old):
        def train_batch(self, *, batch_idx: int, epoch_idx: int, batch: Any, model: torch.nn.Module) -> Any:
            assert model.training
            return super().train_batch(batch, model, epoch_idx, batch_idx)

        def evaluate_batch(self, *, model: torch.nn.Module, batch: Any) -> dict[str, Any]:
            assert not model.training
            assert not torch.is_grad_enabled()
            return super().evaluate_batch(batch, model)

    assert_same_training(fit_with_determineds_trainer(Keywords), fit_with_determineds_trainer(Migrated))


def test_arguments_taken_together() -> None:
    class Together(Old):
        def train_batch(self, **arguments: Any) -> Any:
            return super().train_batch(**arguments)

    assert_same_training(fit_with_determineds_trainer(Together), fit_with_determineds_trainer(Migrated))


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
        old, migrated = fit_twice(Old), fit_twice(Migrated)
    assert_same_training(old, migrated)
    assert len(old.context.models) == len(old.context.optimizers) == len(old.context.lr_schedulers) == 1


# Checkpoints


@pytest.mark.parametrize("aggregation_frequency", [1, 2])
@pytest.mark.parametrize("stop_after", [3, EPOCH_LEN, EPOCH_LEN + 3])
def test_a_resumed_run_ends_bit_equal(stop_after: int, aggregation_frequency: int, tmp_path: Path) -> None:
    straight = fit_with_determineds_trainer(Old, aggregation_frequency, checkpoint_storage=tmp_path / "straight")
    parts = tmp_path / "parts"
    fit_with_determineds_trainer(Old, aggregation_frequency, max_length=stop_after, checkpoint_storage=parts)
    (checkpoint,) = CheckpointStorage(parts).list_ids()
    resumed = fit_with_determineds_trainer(
        Old, aggregation_frequency, seed=99, checkpoint_storage=parts, latest_checkpoint=checkpoint
    )
    assert torch.equal(weights_of(resumed), weights_of(straight))
    assert str(resumed.context.get_optimizer().state_dict()) == str(straight.context.get_optimizer().state_dict())
    assert resumed.context.get_lr_scheduler().state_dict() == straight.context.get_lr_scheduler().state_dict()


def test_a_migrated_trial_resumes(tmp_path: Path) -> None:
    fit_with_determineds_trainer(Old, max_length=8, checkpoint_storage=tmp_path)
    (checkpoint,) = CheckpointStorage(tmp_path).list_ids()
    resumed = fit_with_determineds_trainer(Migrated, seed=99, checkpoint_storage=tmp_path, latest_checkpoint=checkpoint)
    assert torch.equal(weights_of(resumed), weights_of(fit_with_determineds_trainer(Migrated)))


def test_checkpoints_name_the_class(tmp_path: Path) -> None:
    fit_with_determineds_trainer(Old, checkpoint_storage=tmp_path / "one")
    fit_with_lightnings_trainer(Old, callbacks=[DeterminedCheckpoint(tmp_path / "two", policy="none")])
    for load_data in tmp_path.glob("*/*/load_data.json"):
        assert json.loads(load_data.read_text())["trial_cls_spec"] == f"{Old.__module__}:Old"
    assert len(list(tmp_path.glob("*/*/load_data.json"))) == 2


# Telling the interfaces apart


class OwnBuilders(Migrated):
    """Of today's interface, with methods of its own that have the old names."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(self.build_model())
        self.sgd = context.wrap_optimizer(self.optimizer(self.model))
        context.wrap_lr_scheduler(self.create_lr_scheduler(self.sgd), self.step_mode)

    def build_model(self) -> torch.nn.Module:
        return build_model()

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def create_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)


class OwnBuildersAndOptionalModel(OwnBuilders):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int, model: Any = None) -> Any:
        assert model is None
        return super().train_batch(batch, epoch_idx, batch_idx)


class OwnBuildersAndAnyArguments(OwnBuilders):
    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        return super().train_batch(*args, **kwargs)


@pytest.mark.parametrize("trial_class", [OwnBuilders, OwnBuildersAndOptionalModel, OwnBuildersAndAnyArguments])
@pytest.mark.parametrize("fit", [fit_with_determineds_trainer, fit_with_lightnings_trainer])
def test_a_wrapping_trial_is_no_legacy_trial(trial_class: type[Common], fit: Callable[..., Any]) -> None:
    trial = fit(trial_class)
    assert_same_training(trial, fit(Migrated))
    assert adapt_legacy_trial(trial, trial.context) is trial


@pytest.mark.parametrize(
    ("trial_class", "legacy"), [(Old, True), (OldOnFullDataset, True), (Migrated, False), (OwnBuilders, False)]
)
def test_interfaces_are_recognized(trial_class: type[Common], legacy: bool) -> None:
    context = pytorch.PyTorchTrialContext(enable_tensorboard_logging=False)
    trial = trial_class(context)
    assert is_legacy_trial(trial_class) is is_legacy_trial(trial) is legacy
    adapted = adapt_legacy_trial(trial, context)
    assert (adapted is not trial) is legacy
    assert adapt_legacy_trial(adapted, context) is adapted
    assert original_trial(adapted) is trial


# Errors


class NoLoss(Old):
    def train_batch(self, batch: Any, model: torch.nn.Module, epoch_idx: int, batch_idx: int) -> Any:
        return {"accuracy": 1.0, "mse": loss_of(model, batch)}


class ValidationOfNone(Old):
    def evaluate_batch(self, batch: Any, model: torch.nn.Module) -> Any:
        return None


class FullValidationOfNone(OldOnFullDataset):
    def evaluate_full_dataset(self, data_loader: Any, model: torch.nn.Module) -> Any:
        return None


class TwoEvaluations(Old, OldOnFullDataset):
    pass


class ModelOfNone(Old):
    def build_model(self) -> Any:
        return None


class OptimizerOfParameters(Old):
    def optimizer(self, model: torch.nn.Module) -> Any:
        return [*model.parameters()]


class BareScheduler(Old):
    def create_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2)


class SchedulerOfAnotherOptimizer(Old):
    def create_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return super().create_lr_scheduler(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))


class NoOptimizer(Old):
    optimizer: Any = None


class NothingBuiltAndNoEvaluation(OldWithoutEvaluation):
    build_model: Any = None
    optimizer: Any = None


class WrapsAsWell(Old):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.model = context.wrap_model(self.build_model())


InvalidTrial = errors.InvalidExperimentException


@pytest.mark.parametrize("fit", [fit_with_determineds_trainer, fit_with_lightnings_trainer])
@pytest.mark.parametrize(
    ("trial_class", "error", "message"),
    [
        (NoLoss, TypeError, r"NoLoss.train_batch\(\) must return .* under 'loss'.*got {'accuracy'.* batch 0"),
        (ValidationOfNone, TypeError, r"ValidationOfNone.evaluate_batch\(\) must return a dict"),
        (FullValidationOfNone, TypeError, r"FullValidationOfNone.evaluate_full_dataset\(\) must return a dict"),
        (OldWithoutEvaluation, InvalidTrial, "OldWithoutEvaluation must override exactly one .*overrides neither"),
        (TwoEvaluations, InvalidTrial, "TwoEvaluations must .* overrides evaluate_batch and evaluate_full_dataset"),
        (ModelOfNone, TypeError, r"ModelOfNone.build_model\(\) must return a torch.nn.Module; got None"),
        (OptimizerOfParameters, TypeError, r"OptimizerOfParameters.optimizer\(\) must return a torch.optim.Optimizer"),
        (BareScheduler, TypeError, r"got a StepLR. .*LRScheduler\(scheduler, step_mode=.*STEP_EVERY_BATCH"),
        (SchedulerOfAnotherOptimizer, InvalidTrial, r"got an optimizer \(SGD\) that was not wrapped"),
        (NoOptimizer, InvalidTrial, r"NoOptimizer.train_batch\(\) takes a model.*does not define optimizer\(\)"),
        (
            NothingBuiltAndNoEvaluation,
            InvalidTrial,
            r"does not define build_model\(\) and optimizer\(\).*no wrapped model.*no wrapped optimizer.*neither",
        ),
        (WrapsAsWell, InvalidTrial, "WrapsAsWell.*wraps nothing, but something is wrapped already"),
    ],
)
def test_incomplete_trials(
    fit: Callable[..., Any], trial_class: type[Common], error: type[BaseException], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(trial_class)


@pytest.mark.slow
def test_configured_mixed_precision() -> None:
    def configured(level: str) -> dict[str, Any]:
        return {"optimizations": {"mixed_precision": level}}

    plain = fit_with_determineds_trainer(Old, exp_conf=configured("O0"))
    assert torch.equal(weights_of(plain), weights_of(fit_with_determineds_trainer(Old)))
    halved = weights_of(fit_with_determineds_trainer(Old, exp_conf=configured("O2")))
    assert not torch.equal(halved, weights_of(plain))
    torch.testing.assert_close(halved.float(), weights_of(plain), rtol=0.05, atol=0.02)
    with pytest.raises(
        errors.ConfigError, match=r"optimizations.mixed_precision: must be 'O0', 'O1', 'O2' or 'O3'; got 'O4'"
    ):
        fit_with_determineds_trainer(Old, exp_conf=configured("O4"))
