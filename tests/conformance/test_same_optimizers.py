"""Updates, aggregation, clipping and learning rates, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.sides import compare
from tests.conformance.trials import EPOCH_LEN, adversarial, basic

pytest.importorskip("determined", reason="the real determined is not installed; run tox -e conformance")

LENGTH = 2 * EPOCH_LEN + 3


@pytest.mark.parametrize("average", [None, True, False])
@pytest.mark.parametrize("frequency", [1, 2, 4, 5])
def test_aggregation(frequency: int, average: bool | None) -> None:
    def make(api: Any) -> type:
        class Aggregating(basic(api)):  # type: ignore[misc]
            def __init__(self, context: Any) -> None:
                super().__init__(context)
                optimizer = torch.optim.SGD(self.model.parameters(), 0.05)
                context.optimizers.clear()
                self.optimizer = context.wrap_optimizer(optimizer, average_aggregated_gradients=average)

        return Aggregating

    compare(make, init={"aggregation_frequency": frequency}, max_length=lambda api: api.Batch(LENGTH))


@pytest.mark.parametrize("frequency", [1, 3])
def test_two_optimizers_under_aggregation(frequency: int) -> None:
    compare(adversarial, init={"aggregation_frequency": frequency}, max_length=lambda api: api.Batch(LENGTH))


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
def test_kinds_of_optimizers(make_optimizer: Any) -> None:
    def make(api: Any) -> type:
        return type("Kind", (basic(api),), {"make_optimizer": lambda self, p: make_optimizer(p)})

    compare(make, max_length=lambda api: api.Batch(9), checkpoint_policy="none")


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
def test_an_optimizer_that_is_none_of_torchs(frequency: int) -> None:
    def make(api: Any) -> type:
        return type("Plain", (basic(api),), {"make_optimizer": lambda self, parameters: PlainDescent(parameters)})

    trace = compare(make, init={"aggregation_frequency": frequency}, max_length=lambda api: api.Batch(9))
    assert trace.final["optimizers"][1] == {"steps": 9 // frequency}


@pytest.mark.parametrize("aggregation", [1, 2, 3])
def test_two_optimizers_of_the_same_parameters(aggregation: int) -> None:
    """With each step the gradients are divided, and zeroed."""

    def make(api: Any) -> type:
        class Shared(basic(api)):  # type: ignore[misc]
            def __init__(self, context: Any) -> None:
                super().__init__(context)
                self.second = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), 0.01))

            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                metrics = super().train_batch(batch, epoch_idx, batch_idx)
                self.context.backward(self.loss(batch))
                self.context.step_optimizer(self.second)
                return metrics

        return Shared

    compare(make, init={"aggregation_frequency": aggregation}, max_length=lambda api: api.Batch(9))


def test_parameters_that_are_added_in_the_middle() -> None:
    def make(api: Any) -> type:
        class Growing(basic(api)):  # type: ignore[misc]
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                if batch_idx == 3:
                    self.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})
                return super().train_batch(batch, epoch_idx, batch_idx)

        return Growing

    compare(make, max_length=lambda api: api.Batch(7), checkpoint_period=lambda api: api.Batch(2))


@pytest.mark.parametrize("frequency", [1, 2])
def test_clipping_sees_averaged_gradients(frequency: int) -> None:
    def make(api: Any) -> type:
        class Clipping(basic(api)):  # type: ignore[misc]
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                loss, norms = self.loss(batch), []
                self.context.backward(loss)
                self.context.step_optimizer(
                    self.optimizer, clip_grads=lambda p: norms.append(torch.nn.utils.clip_grad_norm_(p, 0.1))
                )
                return {"loss": loss, "norm": sum(norms)}

        return Clipping

    compare(make, init={"aggregation_frequency": frequency}, max_length=lambda api: api.Batch(9))


def test_gradients_that_the_trial_zeroes_itself() -> None:
    def make(api: Any) -> type:
        class Zeroes(basic(api)):  # type: ignore[misc]
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                if batch_idx % 3 == 0:
                    self.optimizer.zero_grad()
                loss = self.loss(batch)
                self.context.backward(loss)
                self.context.step_optimizer(self.optimizer, auto_zero_grads=False)
                return {"loss": loss}

        return Zeroes

    compare(make, max_length=lambda api: api.Batch(10), validation_period=lambda api: api.Batch(4))


@pytest.mark.parametrize("aggregation", [1, 2, 4])
@pytest.mark.parametrize("frequency", [1, 2, 3, 1.5])
@pytest.mark.parametrize("mode", ["STEP_EVERY_EPOCH", "STEP_EVERY_BATCH", "STEP_EVERY_OPTIMIZER_STEP", "MANUAL_STEP"])
def test_step_modes(mode: str, frequency: int, aggregation: int) -> None:
    """STEP_EVERY_OPTIMIZER_STEP looks at the index of the batch; that quirk changes numbers and is kept."""

    def make(api: Any) -> type:
        class Scheduled(basic(api)):  # type: ignore[misc]
            def __init__(self, context: Any) -> None:
                super().__init__(context)
                scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
                self.scheduler = context.wrap_lr_scheduler(
                    scheduler, api.LRScheduler.StepMode[mode], frequency=frequency
                )
                assert self.scheduler is scheduler

            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                metrics = super().train_batch(batch, epoch_idx, batch_idx)
                if mode == "MANUAL_STEP" and batch_idx % 4 == 0:
                    self.scheduler.step()
                return metrics

        return Scheduled

    compare(
        make,
        init={"aggregation_frequency": aggregation},
        max_length=lambda api: api.Batch(LENGTH),
        checkpoint_policy="none",
    )


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.StepLR(o, 2)],
            milestones=[4],
        ),
    ],
    ids=["OneCycle", "WarmRestarts", "Lambda", "Sequential"],
)
def test_kinds_of_schedulers(make_scheduler: Any) -> None:
    def make(api: Any) -> type:
        class Scheduled(basic(api)):  # type: ignore[misc]
            def __init__(self, context: Any) -> None:
                super().__init__(context)
                mode = api.LRScheduler.StepMode.STEP_EVERY_BATCH
                context.wrap_lr_scheduler(make_scheduler(self.optimizer), mode)

        return Scheduled

    compare(make, max_length=lambda api: api.Batch(14), validation_period=lambda api: api.Batch(6))


def test_a_plateau_scheduler_that_a_callback_steps() -> None:
    def make(api: Any) -> type:
        class Plateau(basic(api)):  # type: ignore[misc]
            def __init__(self, context: Any) -> None:
                super().__init__(context)
                self.scheduler = context.wrap_lr_scheduler(
                    torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, threshold=0.5),
                    api.LRScheduler.StepMode.MANUAL_STEP,
                )

            def build_callbacks(self) -> dict[str, Any]:
                def on_validation_end(callback: Any, metrics: dict[str, Any]) -> None:
                    self.scheduler.step(metrics["validation_loss"])

                return {"plateau": type("P", (api.PyTorchCallback,), {"on_validation_end": on_validation_end})()}

        return Plateau

    trace = compare(make, max_length=lambda api: api.Batch(16), validation_period=lambda api: api.Batch(2))
    rates = [entry[-1] for entry in trace.named("train_batch")]
    assert rates[0] != rates[-1]


@pytest.mark.parametrize("amp", ["use_amp", "wrap_scaler"])
def test_torch_amp_without_an_accelerator(amp: str) -> None:
    """Without CUDA the scaler is disabled; calls, keys of the checkpoint and numbers are the same."""

    def make(api: Any) -> type:
        class Amp(basic(api)):  # type: ignore[misc]
            def __init__(self, context: Any) -> None:
                if amp == "use_amp":
                    context.experimental.use_amp()
                else:
                    self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3))
                super().__init__(context)

            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                loss = self.loss(batch)
                if amp == "use_amp":
                    self.context.backward(loss)
                    self.context.step_optimizer(self.optimizer, clip_grads=lambda p: None)
                else:
                    self.context.backward(self.scaler.scale(loss))
                    self.context.step_optimizer(self.optimizer, scaler=self.scaler)
                    self.scaler.update()
                return {"loss": loss}

        return Amp

    trace = compare(make, max_length=lambda api: api.Batch(8), checkpoint_period=lambda api: api.Batch(4))
    assert "scaler_state_dict" in trace.checkpoints[-1]["keys"]
