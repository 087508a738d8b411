"""The context: wrapping, stepping, and the position of the training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning import errors
from det_lightning.distributed.backend import LocalBackend
from det_lightning.precision.scaling import TorchAmp
from det_lightning.pytorch import LRScheduler, PyTorchTrialContext

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


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize(
    ("make", "mode", "message"),
    [
        (torch.optim.lr_scheduler.ReduceLROnPlateau, Mode.STEP_EVERY_BATCH, "ReduceLROnPlateau.*MANUAL_STEP"),
        (lambda _: step_lr(torch.optim.SGD([make_weight()])), Mode.STEP_EVERY_BATCH, "StepLR .* was not wrapped"),
        (step_lr, "STEP_EVERY_BATCH", "must be an LRScheduler.StepMode"),
    ],
)
def test_unsteppable_scheduler_is_refused(make: Callable[..., Any], mode: Any, message: str) -> None:
    context = make_context()
    optimizer = wrapped_sgd(context, make_weight())
    with pytest.raises(TypeError if mode == "STEP_EVERY_BATCH" else errors.InvalidExperimentException, match=message):
        context.wrap_lr_scheduler(make(optimizer), mode)
    assert context.lr_schedulers == []


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([lambda c: c.wrap_model(torch.nn.Linear(1, 1)), lambda c: c.wrap_scaler(object())], "before the first wrap_m"),
        ([lambda c: c.wrap_scaler(object())] * 2, "Choose either torch.amp"),
        ([lambda c: wrapped_sgd(c, make_weight(), backward_passes_per_step=0)], "at least 1; got 0"),
    ],
)
def test_calls_in_the_wrong_order_are_refused(steps: list[Callable[[Any], Any]], message: str) -> None:
    context = make_context()
    for step in steps[:-1]:
        step(context)
    with pytest.raises(errors.InvalidExperimentException, match=message):
        steps[-1](context)


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


def test_gradients_are_kept_if_asked() -> None:
    context, weight = make_context(), make_weight()
    context.position.batch_idx = 0
    optimizer = wrapped_sgd(context, weight)
    context.backward(weight * 3)
    context.step_optimizer(optimizer, auto_zero_grads=False, backward_passes_per_step=1)
    assert weight.grad == 3


def test_unusable_steps_are_refused() -> None:
    context = make_context(aggregation_frequency=2)
    with pytest.raises(errors.InvalidExperimentException, match=r"got a SGD that was not wrapped.*0 optimizer"):
        context.step_optimizer(torch.optim.SGD([make_weight()], lr=1))
    with pytest.raises(errors.InvalidExperimentException, match=r"auto_zero_grads=False.*aggregation_frequency=2"):
        context.step_optimizer(wrapped_sgd(context, make_weight()), auto_zero_grads=False)


@given(epoch_len=st.integers(1, 9), batch_idx=st.integers(0, 40))
def test_the_position_follows_the_batch(epoch_len: int, batch_idx: int) -> None:
    context = make_context()
    context.position.epoch_len, context.position.batch_idx = epoch_len, batch_idx
    assert context.current_train_batch() == batch_idx
    assert context.current_train_epoch() == batch_idx // epoch_len
    assert context.is_epoch_start() == (batch_idx in range(0, 41, epoch_len))
    assert context.is_epoch_end() == (batch_idx + 1 in range(0, 42, epoch_len))


@pytest.mark.parametrize("ask", ["current_train_epoch", "is_epoch_start", "is_epoch_end"])
def test_position_is_unknown_before_training(ask: str) -> None:
    context = make_context()
    for batch_idx, reason in ((None, "training has not started"), (0, "training loader is not built")):
        context.position.batch_idx = batch_idx
        with pytest.raises(errors.InternalException, match=reason):
            getattr(context, ask)()
    assert context.current_train_batch() == 0


@pytest.mark.parametrize("method", ["set_stop_requested", "set_enable_tensorboard_logging"])
def test_switches_take_only_a_bool(method: str) -> None:
    with pytest.raises(AssertionError, match=rf"{method}\(\) takes a bool; got 1"):
        getattr(make_context(), method)(1)


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
