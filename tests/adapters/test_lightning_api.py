"""A TrialModule under ``pl.Trainer``: like any other LightningModule."""

from __future__ import annotations

import csv
import functools
import itertools
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.adapters.strategies import PerModelDDPStrategy
from det_lightning.callbacks import DeterminedCheckpoint
from tests.adapters.training import resumes_exactly, trained
from tests.lightning import BoringModel, fit, pl, trainer
from tests.trials import (
    BATCH_SIZE,
    EPOCH_LEN,
    SmallTrial,
    failing_at,
    fit_trial,
    make_data,
    seed_everything,
    weights_of,
)
from tests.versions import from_lightning_2_6


def read_rows(logger: Any) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def steps_in(directory: Path, pattern: str = "*.ckpt") -> list[int]:
    """Return the steps of the optimizers at each file of Lightning."""
    return sorted(torch.load(path, weights_only=False)["global_step"] for path in directory.glob(pattern))


class RecordingTrial(SmallTrial):
    """Notes the batches that it trains on, and after how many of them it is validated."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.validated: list[int] = []
        self.seen: list[list[float]] = []

    @property
    def trained(self) -> int:
        return len(self.seen)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.seen.append(batch[0].flatten().tolist())
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 0:
            self.validated.append(self.trained)
        return super().evaluate_batch(batch)


@functools.cache
def weights_by_determineds_api() -> torch.Tensor:
    """Return the weights of three epochs."""
    seed_everything()
    return weights_of(fit_trial(max_length=pytorch.Epoch(3), validation_period=pytorch.Epoch(1)))


@pytest.mark.parametrize("name", ["Callback", "TQDMProgressBar", "RichProgressBar", "Timer", "LearningRateMonitor"])
def test_both_apis_agree(name: str, tmp_path: Path) -> None:
    logger, callback = pl.loggers.CSVLogger(tmp_path), getattr(pl.callbacks, name)()
    module = trained(max_epochs=3, callbacks=[callback], logger=logger, log_every_n_steps=5)
    assert torch.equal(weights_of(module.trial), weights_by_determineds_api())


@pytest.mark.parametrize(
    ("flags", "validated_after"),
    [
        ({"check_val_every_n_epoch": None, "val_check_interval": 5}, [5, 10, 15, 20]),
        ({"val_check_interval": 0.5}, [3, 6, 10, 13, 17, 20]),
        ({"limit_train_batches": 3}, [3, 6, 9]),
        ({"limit_train_batches": 0}, []),
        ({"limit_val_batches": 0}, []),
    ],
)
def test_flags_say_when_to_validate(flags: dict[str, Any], validated_after: list[int]) -> None:
    assert trained(RecordingTrial, max_epochs=3, **flags).trial.validated == validated_after


def test_callbacks_log_with_batches(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    logging = pl.callbacks.LambdaCallback(on_train_batch_end=lambda trainer, module, *_: module.log("value", 0.25))
    callbacks = [logging, pl.callbacks.LearningRateMonitor("step")]
    fit(TrialModule(SmallTrial), max_epochs=2, logger=logger, log_every_n_steps=5, callbacks=callbacks)
    rows = read_rows(logger)
    steps = [[row["step"] for row in rows if row[name]] for name in ("value", "lr-SGD", "loss", "validation_loss")]
    assert steps == [["5", "10"], ["5", "10"], ["5", "7", "10", "14"], ["7", "14"]]
    rates = [float(row["lr-SGD"]) for row in rows if row["lr-SGD"]]
    assert rates == pytest.approx([0.02 * 0.99**4, 0.02 * 0.99**9])  # of the fifth and the tenth batch


class SameName(SmallTrial):
    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss(batch), "accuracy": 0.5}


@pytest.mark.parametrize(("first", "validated"), [(False, ["7"]), (True, ["0", "7"])])
def test_equal_names_get_the_prefix_val(first: bool, validated: list[str], tmp_path: Path) -> None:
    monitors = [pl.callbacks.EarlyStopping(name) for name in ("val_loss", "accuracy")]
    module, logger = TrialModule(SameName, step_zero_validation=first), pl.loggers.CSVLogger(tmp_path)
    lightning = fit(module, callbacks=monitors, logger=logger)
    assert lightning.callback_metrics.keys() == {"loss", "batch", "val_loss", "accuracy"}
    for name, steps in (("loss", ["7"]), ("val_loss", validated), ("accuracy", validated)):
        assert [row["step"] for row in read_rows(logger) if row[name]] == steps, name
    (metrics,) = trainer().validate(module, verbose=False)
    assert metrics.keys() == {"val_loss", "accuracy"}


def test_a_lone_first_validation_is_logged(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fit(TrialModule(failing_at(0, ZeroDivisionError(), SameName), step_zero_validation=True), logger=logger)
    (row,) = read_rows(logger)
    assert row == {"step": "0", "epoch": "0", "loss": row["loss"], "accuracy": "0.5"}


def test_a_logger_changes_no_metrics(tmp_path: Path) -> None:
    class Seen(pl.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            kinds = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]
            facts = [{name: (type(value), float(value)) for name, value in kind.items()} for kind in kinds]
            seen.append((facts, trainer.callback_metrics["validation_loss"].dtype))

    seen: list[Any] = []
    for logger in (False, pl.loggers.CSVLogger(tmp_path)):
        trained(logger=logger, callbacks=[Seen()])
    without, with_logger = seen
    assert without == with_logger
    (_, logged, _), dtype = without
    assert dtype is torch.float64
    assert "validation_loss" in logged


@pytest.mark.parametrize("method", ["log", "log_dict"])
def test_an_override_of_log_sees_metrics(method: str) -> None:
    logged: list[str] = []

    def override(self: TrialModule, *args: Any, **kwargs: Any) -> None:
        logged.extend([kwargs["name"]] if method == "log" else args[0])
        getattr(TrialModule, method)(self, *args, **kwargs)

    trained(type("Module", (TrialModule,), {method: override})(SmallTrial))
    assert logged == ["validation_loss"]


class Stop(pl.Callback):
    """Ends the training after a number of batches, as Lightning's ``Timer`` does after a time."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        trainer.should_stop = pl_module.trial_run.state.batches_trained == self.batches


@pytest.mark.parametrize(
    ("flags", "saved_after"),
    [
        ({"max_epochs": 2}, [7, 14]),
        ({"max_epochs": 2, "limit_val_batches": 0}, [7, 14]),
        ({"max_steps": 20}, [7, 10]),  # two optimizers each step once per batch
        ({"max_epochs": 2, "val_check_interval": 3}, [3, 6, 10, 13]),
        ({"max_epochs": 2, "callbacks": [Stop(10)]}, [7, 10]),
    ],
)
def test_model_checkpoint_saves_as_ever(flags: dict[str, Any], saved_after: list[int], tmp_path: Path) -> None:
    checkpoints = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, save_last=True)
    trained(callbacks=[*flags.pop("callbacks", []), checkpoints], **flags)
    assert steps_in(tmp_path, "epoch*.ckpt") == [2 * batches for batches in saved_after]
    assert steps_in(tmp_path, "last.ckpt") == [2 * saved_after[-1]]
    if not flags.keys() & {"limit_val_batches", "val_check_interval"}:  # without these, other batches are validated
        assert resumes_exactly(checkpoints.last_model_path, epochs=3)


@pytest.mark.parametrize(("period", "after"), [(4, [4, 8, 12, 16, 18]), ([5, 7, 12, 15], [5, 7, 12, 15, 18])])
def test_model_checkpoint_saves_after_validations(period: Any, after: list[int], tmp_path: Path) -> None:
    module = TrialModule(RecordingTrial, validation_period=pytorch.Batch(period), max_length=pytorch.Batch(18))
    trained(module, callbacks=[pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1)])
    assert module.trial.validated == after
    assert steps_in(tmp_path) == [2 * batches for batches in after]


def test_a_stop_by_a_callback_validates() -> None:
    module = trained(RecordingTrial, max_epochs=2, callbacks=[Stop(10)])
    assert module.trial.validated == [7, 10]
    assert module.trainer.callback_metrics["batch"] == pytest.approx(8)  # the mean over batches 7 to 9


def test_early_stopping_waits_for_min_steps() -> None:
    stopping = pl.callbacks.EarlyStopping("validation_loss", patience=0, mode="max")
    trial = trained(RecordingTrial, max_epochs=4, min_steps=30, callbacks=[stopping]).trial
    assert (trial.trained, trial.validated) == (15, [7, 14, 15])


def test_model_checkpoint_finds_training_metrics(tmp_path: Path) -> None:
    losses: list[float] = []

    class Trial(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            losses.append(metrics["loss"].item())
            return {**metrics, "none": None, "list": [1, 2]}

    by_step = pl.callbacks.ModelCheckpoint(tmp_path, monitor="loss", every_n_train_steps=4, save_top_k=-1)
    trained(Trial, callbacks=[by_step], log_every_n_steps=100, limit_val_batches=0)
    means = [sum(losses[:batches]) / batches for batches in (2, 4, 6)]
    assert [value.item() for value in by_step.best_k_models.values()] == pytest.approx(means)


def test_early_stopping_sees_metrics_at_an_epochs_end() -> None:
    stopping = pl.callbacks.EarlyStopping("loss", min_delta=1000.0, patience=1, check_on_train_epoch_end=True)
    module = trained(max_epochs=9, limit_val_batches=0, log_every_n_steps=100, callbacks=[stopping])
    assert module.trainer.current_epoch == 2


FailingTrial = failing_at(10, ValueError("the batch is broken"))


def test_checkpoint_saved_after_a_failed_fit_resumes(tmp_path: Path) -> None:
    seed_everything()
    lightning = trainer(max_epochs=2)
    with pytest.raises(ValueError, match="the batch is broken"):
        lightning.fit(TrialModule(FailingTrial))
    lightning.save_checkpoint(tmp_path / "saved.ckpt")
    assert resumes_exactly(tmp_path / "saved.ckpt")


def test_a_second_run_names_its_checkpoints(tmp_path: Path) -> None:
    writer = DeterminedCheckpoint(tmp_path, policy="none")
    trained(callbacks=[writer])
    assert writer.last_checkpoint_path is not None
    with pytest.raises(ValueError, match="the batch is broken"):
        fit(TrialModule(FailingTrial), max_epochs=2, callbacks=[writer])
    assert writer.last_checkpoint_path is None
    assert writer.describe_saved().startswith("Nothing was saved")


def test_validate_takes_a_checkpoint(tmp_path: Path) -> None:
    writer = DeterminedCheckpoint(tmp_path, policy="none")
    expected = fit(TrialModule(SmallTrial), max_epochs=2, callbacks=[writer]).callback_metrics["validation_loss"]
    path = str(writer.last_checkpoint_path)
    (metrics,) = trainer().validate(TrialModule(SmallTrial), ckpt_path=path, verbose=False)
    assert metrics == {"validation_loss": expected.item()}


def test_second_fit_begins_anew() -> None:
    module = trained(RecordingTrial)
    assert fit(module, max_steps=14).global_step == 14
    assert module.trial.validated == [7, 14]


def test_determineds_api_leaves_models_on_the_device() -> None:
    """Lightning would move them to the CPU, even from there."""
    moves: list[Any] = []

    class Noting(SmallTrial, pytorch.PyTorchCallback):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"noting": self}

        def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
            self.head._apply = moves.append  # type: ignore[assignment]

    fit_trial(Noting)
    assert not moves


def test_trial_built_for_one_process_is_refused_by_two() -> None:
    builder = trained().trial_builder
    with pytest.raises(errors.InvalidExperimentException, match=r"built for 1 process\(es\), and this trainer has 2"):
        builder.build(trainer(strategy=PerModelDDPStrategy(), devices=2))


def test_flags_are_restored() -> None:
    module = TrialModule(RecordingTrial, max_length=pytorch.Batch(9))
    lightning = fit(module, check_val_every_n_epoch=2)
    assert module.trial.trained == 9
    assert (lightning.check_val_every_n_epoch, lightning.max_epochs) == (2, 1)


@pytest.mark.parametrize("max_length", [pytorch.Batch(9), pytorch.Epoch(2)])
def test_a_bar_shows_all_epochs(max_length: pytorch.TrainUnit) -> None:
    descriptions: set[str] = set()

    class Bar(pl.callbacks.RichProgressBar):
        def _get_train_description(self, current_epoch: int) -> str:
            description = super()._get_train_description(current_epoch)
            descriptions.add(description.strip())
            return description

    fit(TrialModule(SmallTrial, max_length=max_length), callbacks=[Bar()])
    assert descriptions == {"Epoch 0/1", "Epoch 1/1"}


@pytest.mark.parametrize("flags", [{"max_epochs": None}, {"max_epochs": 1}, {"max_steps": 2}])
@pytest.mark.parametrize("length", [None, pytorch.Batch(1)])
def test_run_without_a_length_is_warned_of(length: Any, flags: dict[str, Any], caplog: Any) -> None:
    class Trial(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            self.context.set_stop_requested(True)
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(TrialModule(Trial, reporting_period=pytorch.Batch(1), max_length=length), **flags)
    assert ("1000 epochs" in caplog.text) == (length is None and flags == {"max_epochs": None})


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize(("amount", "batches"), [(2, 2), (0.3, 2), (0.5, 3), (100, 7)])
def test_overfit_batches_repeats_the_first_in_order(amount: float, batches: int, by_batch: bool) -> None:
    in_order = pytorch.DataLoader(make_data(), batch_size=BATCH_SIZE)
    first = [batch[0].flatten().tolist() for batch in itertools.islice(in_order, batches)]
    callbacks = [pl.callbacks.Timer()] if by_batch else []
    trial = trained(RecordingTrial, max_epochs=3, overfit_batches=amount, callbacks=callbacks).trial
    assert (trial.seen, trial.validated) == (first * 3, [batches, 2 * batches, 3 * batches])


AVERAGING = {"callbacks": [pl.callbacks.StochasticWeightAveraging(0.1)]}
SEVERAL: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "callbacks": [pl.callbacks.BatchSizeFinder()]}


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        pytest.param({"val_check_interval": "00:00:00:03"}, "a time as val_check_interval", marks=from_lightning_2_6),
        ({"logger": "csv"}, r"a logger of type str: pass objects, such as logger=pl.loggers.CSVLogger\('logs'\)"),
        pytest.param(AVERAGING, "StochasticWei.*: .* the callback WeightAveraging", marks=from_lightning_2_6),
        (AVERAGING, "StochasticWeightAveraging: .*AveragedModel"),
        (SEVERAL, "reload_dataloaders_every_n_epochs=1.*BatchSizeFinder: set"),
        ({"overfit_batches": 0.1}, r"overfit_batches=0\.1 of the 7 training batches is less"),
        ({"limit_train_batches": 0.1}, r"limit_train_batches=0\.1 of the 7 training batches is less"),
    ],
)
def test_unsupported_flags_are_refused(flags: dict[str, Any], names: str) -> None:
    with pytest.raises(errors.UnsupportedTrainerFlags, match=names):
        fit(TrialModule(SmallTrial), **flags)


@from_lightning_2_6
def test_averaging_in_processes_is_refused() -> None:
    several = {"devices": 2, "strategy": PerModelDDPStrategy(), "callbacks": [pl.callbacks.WeightAveraging()]}
    test_unsupported_flags_are_refused(several, "WeightAveraging: it works in one process only; wrap")


@pytest.mark.slow
def test_a_compiled_module_is_refused() -> None:
    module = TrialModule(SmallTrial)
    for _ in range(2):
        with pytest.raises(errors.UnsupportedTrainerFlags, match=r"torch.compile\(TrialModule\): compile the"):
            trainer().fit(cast("Any", torch.compile(module)))
    fit(module)
    assert module.trial_run.state.batches_trained == EPOCH_LEN


@pytest.mark.parametrize("start_method", ["popen", "spawn"])
@pytest.mark.parametrize("fault", ["ModelPruning", "torch.compile"])
def test_refusals_come_before_processes(start_method: Any, fault: str) -> None:
    callbacks = [pl.callbacks.ModelPruning("l1_unstructured")] if fault == "ModelPruning" else []
    lightning = trainer(devices=2, strategy=PerModelDDPStrategy(start_method=start_method), callbacks=callbacks)
    module = TrialModule(SmallTrial)
    with pytest.raises(errors.UnsupportedTrainerFlags, match=fault):
        lightning.fit(cast("Any", torch.compile(module)) if fault == "torch.compile" else module)
    assert getattr(lightning.strategy.launcher, "procs", None) == []


def test_strategies_refuse_other_modules() -> None:
    strategy = PerModelDDPStrategy()
    trainer(strategy=strategy, devices=2)
    strategy.connect(BoringModel())
    with pytest.raises(errors.UnsupportedTrainerFlags, match=r"models of a TrialModule; .* models of BoringModel"):
        strategy.configure_ddp()


def test_two_aggregations_are_refused() -> None:
    with pytest.raises(errors.UnsupportedTrainerFlags, match=r"accumulate_grad_batches=4: it means the same as .* 2"):
        fit(TrialModule(SmallTrial, aggregation_frequency=2), accumulate_grad_batches=4)
    fit(TrialModule(SmallTrial, aggregation_frequency=4), accumulate_grad_batches=4)


def test_other_modules_are_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a det_lightning\.adapters\.TrialModule; got a BoringModel"):
        trainer(callbacks=[DeterminedCheckpoint(policy="all")]).fit(BoringModel())


# Flags of Lightning that a trial obeys


def test_accumulate_grad_batches_is_aggregation_frequency() -> None:
    class Trial(SmallTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.aggregates_when_built = context.aggregation_frequency

    accumulated = TrialModule(Trial, exp_conf={"optimizations": {"aggregation_frequency": 5}})
    lightning = fit(accumulated, max_epochs=2, accumulate_grad_batches=3)
    aggregated = trained(TrialModule(SmallTrial, aggregation_frequency=3), max_epochs=2)
    assert torch.equal(weights_of(accumulated.trial), weights_of(aggregated.trial))
    assert lightning.global_step == 2 * (2 * EPOCH_LEN // 3)
    assert (lightning.accumulate_grad_batches, accumulated.trial.aggregates_when_built) == (3, 3)
    fit(accumulated)
    assert accumulated.context.aggregation_frequency == 5


# How many batches a step holds: the data and the flags decide, and no clock


class SlowTrial(SmallTrial):
    seconds = 0.06

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        return super().train_batch(batch, epoch_idx, batch_idx)


class CountingModule(TrialModule):
    steps = 0

    def training_step(self, dataloader_iter: Any) -> None:
        self.steps += 1
        super().training_step(dataloader_iter)


@pytest.mark.parametrize("seconds", [0.0, 0.06])
@pytest.mark.parametrize(
    ("bars", "steps"),
    [
        ([], 2),  # up to batches 7 and 14, where the epochs end; reports after batches 5 and 10 end no step
        ([pl.callbacks.TQDMProgressBar], 4),  # up to batches 5, 7, 10 and 14
    ],
)
def test_slow_batches_take_equal_steps(seconds: float, bars: list[Any], steps: int) -> None:
    trial_class = type("Trial", (SlowTrial,), {"seconds": seconds})
    module = CountingModule(trial_class, reporting_period=pytorch.Batch(5))
    assert trained(module, max_epochs=2, callbacks=[bar() for bar in bars]).steps == steps


@pytest.mark.slow
@pytest.mark.parametrize("bar_class", [pl.callbacks.TQDMProgressBar, pl.callbacks.RichProgressBar])
def test_a_bar_moves_within_a_step(bar_class: Any) -> None:
    shown: list[int] = []

    class Bar(bar_class):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            shown.append(batch_idx)
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    module = CountingModule(SlowTrial, reporting_period=pytorch.Batch(100))
    fit(module, callbacks=[Bar()])
    assert module.steps == 1
    assert len(shown) > 1
    assert (shown, shown[-1]) == (sorted(shown), EPOCH_LEN - 1)
