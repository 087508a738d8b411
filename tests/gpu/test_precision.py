"""Every level and API on a GPU: loss curves beside float32; with torch.amp and a fused optimizer no batch waits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.trials import OnGpu, curve, train

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

#: How far the mean loss of the last ten batches may be from that of float32, as a part of the first loss.
TOLERANCE = 0.02


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
