"""Updates, aggregation, clipping and learning rates, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from tests.conformance.sides import compare
from tests.conformance.trials import EPOCH_LEN, Adversarial, Basic, built, callback, changed, schedule

LENGTH = 2 * EPOCH_LEN + 3


@pytest.mark.parametrize("average", [None, True, False])
@pytest.mark.parametrize("frequency", [1, 2, 4, 5])
def test_aggregated_gradients_train_the_same(frequency: int, average: bool | None) -> None:
    def wrap_another(trial: Any) -> None:
        optimizer = torch.optim.SGD(trial.model.parameters(), 0.05)
        trial.context.optimizers.clear()
        trial.optimizer = trial.context.wrap_optimizer(optimizer, average_aggregated_gradients=average)

    compare(built(wrap_another), init={"aggregation_frequency": frequency}, max_length=LENGTH)


@pytest.mark.parametrize("frequency", [1, 3])
def test_two_optimizers_aggregate_the_same(frequency: int) -> None:
    compare(Adversarial, init={"aggregation_frequency": frequency}, max_length=LENGTH)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, 0.01, centered=True),
        lambda p: torch.optim.Adagrad(p, 0.1),
    ],
    ids=["SGD", "AdamW", "RMSprop", "Adagrad"],
)
def test_optimizers_of_torch_train_the_same(make_optimizer: Any) -> None:
    trial = changed(make_optimizer=lambda self, parameters: make_optimizer(parameters))
    compare(trial, max_length=9, checkpoint_policy="none")


class PlainDescent:
    """An optimizer that is none of torch's, as some libraries have them."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": 0.01}]
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter -= self.param_groups[0]["lr"] * parameter.grad

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


@pytest.mark.parametrize("frequency", [1, 2])
def test_optimizers_of_others_train_the_same(frequency: int) -> None:
    trial = changed(make_optimizer=lambda self, parameters: PlainDescent(parameters))
    trace = compare(trial, init={"aggregation_frequency": frequency}, max_length=9)
    assert trace.final["optimizers"][1] == {"steps": 9 // frequency}


@pytest.mark.parametrize("aggregation", [1, 2, 3])
def test_optimizers_may_share_parameters(aggregation: int) -> None:
    """With each step the gradients are divided, and zeroed."""

    class Shared(Basic):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.second = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), 0.01))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            self.context.backward(self.loss(batch))
            self.context.step_optimizer(self.second)
            return metrics

    compare(Shared, init={"aggregation_frequency": aggregation}, max_length=9)


def test_parameters_added_in_training_train_the_same() -> None:
    class Growing(Basic):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 3:
                self.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})
            return super().train_batch(batch, epoch_idx, batch_idx)

    compare(Growing, max_length=7, checkpoint_period=2)


@pytest.mark.parametrize("frequency", [1, 2])
def test_clipping_sees_averaged_gradients(frequency: int) -> None:
    class Clipping(Basic):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss, norms = self.loss(batch), []
            self.context.backward(loss)
            clips = lambda p: norms.append(torch.nn.utils.clip_grad_norm_(p, 0.1))  # noqa: E731
            self.context.step_optimizer(self.optimizer, clip_grads=clips)
            return {"loss": loss, "norm": sum(norms)}

    compare(Clipping, init={"aggregation_frequency": frequency}, max_length=9)


def test_trial_may_zero_gradients_itself() -> None:
    class Zeroes(Basic):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx % 3 == 0:
                self.optimizer.zero_grad()
            loss = self.loss(batch)
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer, auto_zero_grads=False)
            return {"loss": loss}

    compare(Zeroes, max_length=10, validation_period=4)


@pytest.mark.parametrize("aggregation", [1, 2, 4])
def test_schedulers_step_alike_in_each_mode(aggregation: int) -> None:
    """STEP_EVERY_OPTIMIZER_STEP looks at the index of the batch; that quirk changes numbers and is kept."""

    class Scheduled(Basic):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.by_hand = []
            for mode in ("MANUAL_STEP", "STEP_EVERY_EPOCH", "STEP_EVERY_BATCH", "STEP_EVERY_OPTIMIZER_STEP"):
                for frequency in (1, 2, 3, 1.5):
                    optimizer = context.wrap_optimizer(self.make_optimizer(self.model.parameters()))
                    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
                    assert schedule(self, scheduler, mode, frequency=frequency) is scheduler
                    self.by_hand += [scheduler] if mode == "MANUAL_STEP" else []

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            for optimizer in self.context.optimizers:
                loss = self.loss(batch)
                self.context.backward(loss)
                self.context.step_optimizer(optimizer)
            for scheduler in self.by_hand if batch_idx % 4 == 0 else []:
                scheduler.step()
            return {"loss": loss}

    trace = compare(Scheduled, init={"aggregation_frequency": aggregation}, max_length=LENGTH, checkpoint_policy="none")
    assert len(set(map(str, trace.named("train_batch")[-1][-1][1:]))) > 5  # rates


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)], milestones=[4]),
    ],
    ids=["OneCycle", "WarmRestarts", "Lambda", "Sequential"],
)
def test_schedulers_of_torch_train_the_same(make_scheduler: Any) -> None:
    trial = built(lambda trial: schedule(trial, make_scheduler(trial.optimizer), "STEP_EVERY_BATCH"))
    compare(trial, max_length=14, validation_period=6)


def test_plateau_scheduler_can_be_stepped_by_a_callback() -> None:
    class Plateau(Basic):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            plateau = lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, threshold=0.5)
            self.scheduler = schedule(self, plateau)

        def build_callbacks(self) -> dict[str, Any]:
            step = lambda metrics: self.scheduler.step(metrics["validation_loss"])  # noqa: E731
            return {"plateau": callback(self.api, on_validation_end=step)}

    trace = compare(Plateau, max_length=16, validation_period=2)
    rates = [entry[-1] for entry in trace.named("train_batch")]
    assert rates[0] != rates[-1]
