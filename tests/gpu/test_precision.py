"""Every level and API on a GPU: loss curves beside float32; with torch.amp and a fused optimizer no batch waits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import pytorch

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BATCHES, BATCH_SIZE = 60, 32
#: How far the mean loss of the last ten batches may be from that of float32, as a part of the first loss.
TOLERANCE = 0.02
#: When waiting for the device begins to be an error: before, libraries load and optimizers make their state.
WARM_UP = 3


class OnGpu(pytorch.PyTorchTrial):
    """A model with a batch norm, on data that lie on the GPU, with clipping."""

    make_optimizer: Callable[..., torch.optim.Optimizer] = functools.partial(torch.optim.Adam, fused=True)
    waits = False

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.losses: list[torch.Tensor] = []
        self.scaler: Any = None
        torch.manual_seed(0)
        self.build()

    def build(self) -> None:
        layers = [torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
        self.model = self.context.wrap_model(torch.nn.Sequential(*layers))
        self.optimizer = self.context.wrap_optimizer(type(self).make_optimizer(self.model.parameters(), lr=0.01))

    def make_loader(self) -> pytorch.DataLoader:
        inputs = torch.randn(BATCHES * BATCH_SIZE, 16, generator=torch.Generator().manual_seed(1))
        inputs = inputs.to(self.context.device)
        return pytorch.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), BATCH_SIZE)

    build_training_data_loader = build_validation_data_loader = make_loader

    def loss(self, batch: Any) -> torch.Tensor:
        return ((self.model(batch[0]) - batch[1]) ** 2).mean()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == WARM_UP and not self.waits:
            torch.cuda.set_sync_debug_mode("error")
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.context.backward(loss if self.scaler is None else self.scaler.scale(loss))
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        clip = lambda p: torch.nn.utils.clip_grad_norm_(p, 10.0)  # noqa: E731
        self.context.step_optimizer(self.optimizer, clip_grads=clip, scaler=self.scaler)
        if self.scaler is not None:
            self.scaler.update()
        if batch_idx == BATCHES - 1:
            torch.cuda.set_sync_debug_mode("default")
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"validation_loss": self.loss(batch)}


FUSED_SGD = functools.partial(torch.optim.SGD, fused=True)


def at_level(level: str, optimizer: Any = OnGpu.make_optimizer, **overrides: Any) -> type[OnGpu]:
    class AtLevel(OnGpu):
        make_optimizer = optimizer
        waits = True  # for the flag of an overflow

        def build(self) -> None:
            super().build()
            self.model, self.optimizer = self.context.configure_apex_amp(
                self.model, self.optimizer, opt_level=level, **overrides
            )

    return AtLevel


class UsesAmp(OnGpu):
    def build(self) -> None:
        self.context.experimental.use_amp()
        super().build()


class WrapsScaler(OnGpu):
    def build(self) -> None:
        self.scaler = self.context.wrap_scaler(torch.amp.GradScaler("cuda"))
        super().build()
        self.model = self.context.autocast_forward_pass(self.model)


class WithMomentum(UsesAmp):
    make_optimizer = functools.partial(FUSED_SGD, momentum=0.9)


@pytest.fixture(autouse=True)
def default_sync_mode() -> Any:
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


def train(kind: type[OnGpu], storage: Path, **lightning: Any) -> OnGpu:
    with pytorch.init(enable_tensorboard_logging=False) as context:
        trial = kind(context)
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False, **lightning)
        end = pytorch.Batch(BATCHES)
        trainer.fit(max_length=end, reporting_period=end, checkpoint_policy="none", checkpoint_storage=storage)
        return trial


def curve(trial: OnGpu) -> torch.Tensor:
    return torch.stack(trial.losses).float().cpu()


@pytest.mark.parametrize(
    ("kind", "lightning"),
    [
        (at_level("O0"), {}),
        (at_level("O1"), {}),
        (at_level("O1", loss_scale=128.0), {}),
        (at_level("O2"), {}),
        (at_level("O2", cast_model_type=torch.bfloat16), {}),
        # The 1e-8 that Adam adds to a divisor is 0 in float16.
        (at_level("O3", FUSED_SGD), {}),
        (at_level("O3", FUSED_SGD, keep_batchnorm_fp32=True, loss_scale="dynamic"), {}),
        (UsesAmp, {}),
        (WithMomentum, {}),
        (WrapsScaler, {}),
        (OnGpu, {"precision": "16-mixed"}),
        (OnGpu, {"precision": "bf16-mixed"}),
        (OnGpu, {"precision": "bf16-true"}),
    ],
)
def test_losses_follow_float32_without_waits(kind: type[OnGpu], lightning: dict[str, Any], tmp_path: Path) -> None:
    plain_kind = type("Plain", (OnGpu,), {"make_optimizer": kind.make_optimizer})
    plain = curve(train(plain_kind, tmp_path / "plain"))
    mixed = curve(train(kind, tmp_path / "mixed", **lightning))
    assert mixed.isfinite().all()
    assert abs(mixed[-10:].mean() - plain[-10:].mean()) <= TOLERANCE * plain[0]


def test_an_overflow_is_skipped_on_the_device(tmp_path: Path) -> None:
    class Overflows(at_level("O2")):  # type: ignore[misc]
        def loss(self, batch: Any) -> torch.Tensor:
            loss = super().loss(batch)
            return loss * float("inf") if len(self.losses) % 10 == 5 else loss

    trial = train(Overflows, tmp_path)
    state = trial.context.precision.scaling.state_dict()["amp_state"]["loss_scaler0"]
    assert state["loss_scale"] <= 2.0**10
    assert curve(trial)[-4:].isfinite().all()
    assert all(p.isfinite().all() for p in trial.model.parameters())
