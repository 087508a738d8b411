"""The context: wrapping, stepping, the position of the training, and settings, as a trial looks them up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.distributed.backend import LocalBackend
from det_lightning.precision.scaling import TorchAmp
from det_lightning.pytorch import LRScheduler, PyTorchTrialContext
from det_lightning.pytorch._settings import TrialSettings
from tests.trials import SmallTrial

Mode = LRScheduler.StepMode


def make_context(**arguments: Any) -> PyTorchTrialContext:
    return PyTorchTrialContext(backend=LocalBackend(torch.device("cpu")), **arguments)


def make_weight(value: float = 1.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(value))


def wrapped_sgd(context: PyTorchTrialContext, weight: torch.nn.Parameter, **options: Any) -> torch.optim.Optimizer:
    return context.wrap_optimizer(torch.optim.SGD([weight], lr=1.0), **options)


def test_wrapping_keeps_the_order() -> None:
    context = make_context()
    models = [torch.nn.Linear(1, 1), torch.nn.Linear(2, 2)]
    assert [context.wrap_model(model) for model in models] == models == context.models
    optimizers = [torch.optim.SGD(model.parameters(), lr=1) for model in models]
    assert [context.wrap_optimizer(optimizer) for optimizer in optimizers] == optimizers == context.optimizers
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1)
    assert context.wrap_lr_scheduler(scheduler, Mode.STEP_EVERY_EPOCH, frequency=2) is scheduler
    (kept,) = context.lr_schedulers
    assert (kept.scheduler, kept.step_mode, kept.frequency) == (scheduler, Mode.STEP_EVERY_EPOCH, 2)


def test_both_spellings_wrap_a_reducer() -> None:
    context = make_context()
    context.wrap_reducer(len, "count").update(1)
    context.experimental.wrap_reducer(sum, "total", for_training=False).update(2)
    assert context.reduce_metrics(for_training=True) == {"count": 1}
    assert context.reduce_metrics(for_training=False) == {"count": 1, "total": 2}


def test_only_one_wrapped_model_and_optimizer_can_be_asked_for() -> None:
    context = make_context()
    with pytest.raises(errors.InvalidExperimentException, match=r"get_model\(\) is for .* one wrapped model; .* has 0"):
        context.get_model()
    model = context.wrap_model(torch.nn.Linear(1, 1))
    optimizer = context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1))
    assert context.get_lr_scheduler() is None
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    assert context.wrap_lr_scheduler(plateau, Mode.MANUAL_STEP) is plateau
    assert (context.get_model(), context.get_optimizer(), context.get_lr_scheduler()) == (model, optimizer, plateau)
    wrapped_sgd(context, make_weight())
    with pytest.raises(errors.InvalidExperimentException, match=r"get_optimizer\(\) .* one wrapped opt.*; .* has 2"):
        context.get_optimizer()


def test_second_scaler_is_refused() -> None:
    context = make_context()
    context.wrap_scaler(object())
    with pytest.raises(errors.InvalidExperimentException, match=r"Choose either torch.amp"):
        context.wrap_scaler(object())


# Training


@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("of_optimizer", [None, False, True])
def test_aggregation_sums_and_divides(frequency: int, average: bool, of_optimizer: bool | None) -> None:
    context = make_context(aggregation_frequency=frequency, average_aggregated_gradients=average)
    weight = make_weight(0.0)
    optimizer = wrapped_sgd(context, weight, average_aggregated_gradients=of_optimizer)
    divisor = frequency if (average if of_optimizer is None else of_optimizer) and frequency > 1 else 1
    clipped: list[float] = []
    for batch in range(frequency):
        context.position.batch_idx = batch
        assert context.is_update_batch() == (batch == frequency - 1)
        assert weight.item() == 0.0
        context.backward(weight * 6)
        context.step_optimizer(optimizer, clip_grads=lambda params: clipped.extend(p.grad.item() for p in params))
    assert clipped == [pytest.approx(6 * frequency / divisor)]
    assert weight.item() == pytest.approx(-6 * frequency / divisor)
    assert weight.grad is None
    assert context.optimizer_steps == 1


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.ones(()), r"In context.backward\(\), the loss has no graph: it was detached.* does not require grad"),
        (
            torch.ones(3, requires_grad=True),
            r"the loss has the shape \(3,\), not \(\): reduce it, .* for scalar outputs",
        ),
    ],
)
def test_unusable_losses_are_refused(loss: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        make_context().backward(loss)


def test_data_go_to_the_present_device() -> None:
    context = make_context()
    context.device = torch.device("meta")
    assert context.to_device([torch.ones(1)])[0].device.type == "meta"


def test_gradients_are_kept_if_asked() -> None:
    context, weight = make_context(), make_weight()
    context.position.batch_idx = 0
    optimizer = wrapped_sgd(context, weight)
    context.backward(weight * 3)
    context.step_optimizer(optimizer, auto_zero_grads=False, backward_passes_per_step=1)
    assert weight.grad == 3


@pytest.mark.parametrize("ask", ["current_train_epoch", "is_epoch_start", "is_epoch_end"])
def test_position_is_unknown_before_training(ask: str) -> None:
    context = make_context()
    for batch_idx, reason in ((None, "training has not started"), (0, "training loader is not built")):
        context.position.batch_idx = batch_idx
        with pytest.raises(errors.InternalException, match=reason):
            getattr(context, ask)()
    assert context.current_train_batch() == 0


def test_from_config_reads_the_experiment_configuration() -> None:
    ranges = {"type": "double", "minval": 0.0, "maxval": 1.0}
    config = {
        "hyperparameters": {"global_batch_size": 4, "lr": ranges, "net": {"depth": {"type": "const", "val": 2}}},
        "optimizations": {"aggregation_frequency": 8},
        "reproducibility": {"experiment_seed": 5},
        "data": {"folder": "images"},
    }
    context = PyTorchTrialContext.from_config(config)
    assert context.get_hparams() == {"global_batch_size": 4, "lr": 0.5, "net": {"depth": 2}}
    assert context.get_per_slot_batch_size() == 4
    assert context.get_data_config() == {"folder": "images"}
    assert context.get_trial_seed() == 5
    weight = make_weight(1.0)
    optimizer = wrapped_sgd(context, weight)
    for expected in (0.0, -1.0):  # each batch counts, and none needs a run
        context.backward(weight * 1.0)
        context.step_optimizer(optimizer)
        assert weight.item() == expected
    with pytest.raises(errors.InternalException, match="training has not started"):
        context.current_train_batch()


def test_private_names_of_determined_follow_the_position() -> None:
    context = make_context(aggregation_frequency=2)
    assert (context._current_batch_idx, context._epoch_len, context._aggregation_frequency) == (None, None, 2)
    with pytest.raises(errors.InternalException, match="training has not started"):
        context._should_communicate_and_update()
    context._current_batch_idx, context._epoch_len = 7, 3
    assert (context.current_train_batch(), context.current_train_epoch()) == (7, 2)
    assert context._should_communicate_and_update()
    context.position.batch_idx = 8
    assert context._current_batch_idx == 8
    assert not context._should_communicate_and_update()


def test_replaced_scaler_is_used() -> None:
    context = make_context()
    context.experimental.use_amp()
    assert not context.scaler.is_enabled()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    context._scaler = scaler
    assert context.scaler is context._scaler is scaler
    weight = make_weight(1.0)
    optimizer = wrapped_sgd(context, weight)
    context.position.batch_idx = 0
    assert isinstance(context.precision.scaling, TorchAmp)
    context.precision.scaling.begin_batch(True)
    context.backward(weight * 0.5)
    assert weight.grad == 2.0
    context.step_optimizer(optimizer)
    context.precision.scaling.end_batch()
    assert (weight.item(), scaler.get_scale()) == (0.5, 8.0)


def test_tensorboard_path_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = make_context(tensorboard_path=tmp_path / "given")
    assert context.get_tensorboard_path() == tmp_path / "given"
    monkeypatch.setattr(context, "get_tensorboard_path", lambda: tmp_path / "patched")
    context.tensorboard.add_scalars([("loss", 1.0, 0)])
    context.get_tensorboard_writer().close()
    assert len(list((tmp_path / "patched").iterdir())) == 2
    assert not (tmp_path / "given").exists()


def test_reset_parameters_draws_all_anew() -> None:
    model = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 1), torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(2, 1)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pytorch.reset_parameters(model)
    assert all((model.state_dict()[name] != value).all() for name, value in before.items())


# Schedulers; tests/conformance has when they step


def make_scheduler(mode: Any, frequency: int = 1) -> LRScheduler:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), mode, frequency)


@pytest.mark.parametrize(
    ("mode", "frequency", "aggregation", "steps"),
    [
        (Mode.STEP_EVERY_BATCH, 1, 1, [1, 1, 1, 1, 1, 1, 1, 1]),
        (Mode.STEP_EVERY_BATCH, 3, 1, [0, 0, 1, 0, 0, 1, 0, 0]),
        (Mode.STEP_EVERY_BATCH, 1, 4, [4, 4]),
        (Mode.STEP_EVERY_BATCH, 3, 4, [1, 1]),
        (Mode.STEP_EVERY_OPTIMIZER_STEP, 1, 4, [1, 1]),
        (Mode.STEP_EVERY_OPTIMIZER_STEP, 8, 4, [0, 1]),
        (Mode.STEP_EVERY_OPTIMIZER_STEP, 3, 4, [0, 0]),
        (Mode.STEP_EVERY_EPOCH, 1, 1, [0, 0, 1, 0, 0, 1, 0, 0]),
        (Mode.STEP_EVERY_EPOCH, 2, 1, [0, 0, 0, 0, 0, 1, 0, 0]),
        (Mode.STEP_EVERY_EPOCH, 1, 2, [1, 0, 1, 1]),
        (Mode.STEP_EVERY_EPOCH, 2, 4, [1, 0]),
        (Mode.MANUAL_STEP, 1, 1, [0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_schedulers_step_by_their_mode_and_frequency(
    mode: LRScheduler.StepMode, frequency: int, aggregation: int, steps: list[int]
) -> None:
    scheduler = make_scheduler(mode, frequency)
    updates = range(aggregation - 1, 8, aggregation)
    assert [scheduler.steps_after(update, 3, aggregation) for update in updates] == steps


@pytest.mark.parametrize("mode", [Mode.STEP_EVERY_BATCH, Mode.STEP_EVERY_OPTIMIZER_STEP])
def test_endless_epochs_step_by_batches_only(mode: LRScheduler.StepMode) -> None:
    assert make_scheduler(mode).steps_after(5, 2**63 - 1, 1) == 1
    assert make_scheduler(Mode.STEP_EVERY_EPOCH).steps_after(5, 2**63 - 1, 1) == 0


def test_unusable_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="frequency of StepLR must be at least 1; got 0"):
        make_scheduler(Mode.STEP_EVERY_BATCH, 0)
    with pytest.raises(TypeError, match="one of STEP_EVERY_EPOCH, STEP_EVERY_BATCH, MANUAL_STEP, STEP_EVERY_OPTIMIZER"):
        make_scheduler("STEP_EVERY_BATCH")


# Hyperparameters, experiment configuration and batch sizes


def test_settings_are_looked_up() -> None:
    conf = {"data": {"url": "here"}, "searcher": {"metric": "loss"}}
    context = PyTorchTrialContext(hparams={"lr": 0.1, "global_batch_size": 32}, exp_conf=conf, trial_seed=7)
    assert context.get_hparams() == {"lr": 0.1, "global_batch_size": 32}
    assert context.get_hparam("lr") == 0.1
    assert context.get_experiment_config() == conf
    assert context.get_data_config() == {"url": "here"}
    assert (context.get_global_batch_size(), context.get_per_slot_batch_size()) == (32, 32)
    assert context.get_trial_seed() == 7
    assert (context.get_trial_id(), context.get_experiment_id(), context.get_initial_batch()) == (0, 0, 0)
    assert PyTorchTrialContext(exp_conf={}).get_data_config() == {}


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("get_hparams", "no hparams; write them into hparams={...} of init"),
        ("get_data_config", "no experiment configuration; pass exp_conf="),
        ("get_per_slot_batch_size", "The batch size is unknown. There is no hyperparameter 'global_batch_size'"),
    ],
)
def test_missing_settings_are_named(method: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(PyTorchTrialContext(), method)()


def test_unknown_hyperparameters_are_named() -> None:
    with pytest.raises(ValueError, match=r"no hyperparameter 'rate' in .*; known are layers, lr"):
        PyTorchTrialContext(hparams={"lr": 1, "layers": 2}).get_hparam("rate")


@given(st.integers(1, 1000), st.integers(1, 16))
def test_batches_are_split_evenly(global_batch_size: int, slots: int) -> None:
    def settings() -> TrialSettings:
        return TrialSettings(hparams={"global_batch_size": global_batch_size}, slots=slots)

    if global_batch_size < slots:
        with pytest.raises(errors.InvalidExperimentException, match=f"is {global_batch_size}, less .* slots, {slots};"):
            settings()
    else:
        assert settings().get_per_slot_batch_size() == global_batch_size // slots
        assert settings().get_global_batch_size() == global_batch_size // slots * slots


LR_RANGE = {"type": "double", "minval": 0.1, "maxval": 0.2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hparams": [("lr", 0.1)]}, r"hparams must be a dict; got \[\('lr', 0.1\)\] of type list"),
        ({"hparams": 1, "exp_conf": [2]}, r"hparams must be a dict; .*; exp_conf must be a dict; got \[2\]"),
        ({"hparams": {"a": {"b": {"type": "categorical", "vals": [1, 2]}}}}, r"hparams\['a'\]\['b'\] describes"),
        ({"hparams": {"a": {"type": "const", "val": 1}, "b": LR_RANGE}}, r"\['a'\] describes val.*\['b'\] describes"),
        ({"hparams": {"global_batch_size": -3}}, "is -3, less than the number of slots, 1;"),
        ({"hparams": {"global_batch_size": 0}}, r"hparams\['global_batch_size'\] must be .* at least 1; got 0"),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidExperimentException, match=message):
        PyTorchTrialContext(**settings)
    with pytest.raises(errors.InvalidExperimentException, match=message):
        TrialModule(SmallTrial, **settings)


def test_groups_may_have_an_entry_named_type() -> None:
    hparams = {"optimizer": {"type": "double", "lr": 0.1}, "schedule": {"type": ["log"]}, "empty": {}}
    assert PyTorchTrialContext(hparams=hparams).get_hparams() == hparams
