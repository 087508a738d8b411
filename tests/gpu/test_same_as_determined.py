"""Trials on a GPU beside the real Determined, to the bit, wherever the real one repeats itself.

Each trial runs three times: real, real again, ours. The same cases run on the CPU too, where no GPU is visible, so that
a machine without one still tests the cases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.sides import Trace, assert_same, run
from tests.conformance.trials import Adversarial, Trial

pytestmark = [
    pytest.mark.determined,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*CUDA is not available.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]),
]

SAMPLES, BATCH_SIZE, BATCHES, PERIOD = 56, 4, 11, 4


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))


def convolutions() -> nn.Module:
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(32, 1))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Flatten(2), layer, nn.Flatten(), nn.Linear(192, 1))


@dataclasses.dataclass(frozen=True)
class Case:
    """A trial: its network and precision, with what the batches go through; a loss is infinite at ``overflow_at``."""

    network: Callable[[], nn.Module] = perceptron
    precision: str = "float32"
    fused: bool = False
    clip: float | None = None
    workers: int = 0
    aggregation: int = 1
    overflow_at: int | None = None


CASES = {
    "float32": Case(),
    "clipping": Case(clip=0.5),
    "convolutions": Case(convolutions),
    "attention": Case(attention),
    "aggregation": Case(convolutions, aggregation=3),
    "pinned_workers": Case(workers=2),
    "use_amp": Case(precision="use_amp"),
    "use_amp_overflow": Case(precision="use_amp", overflow_at=5),
    "use_amp_fused": Case(precision="use_amp", fused=True, overflow_at=5),
    "use_amp_clipping": Case(precision="use_amp", clip=0.5),
    "use_amp_convolutions_aggregation": Case(convolutions, precision="use_amp", aggregation=3),
    "use_amp_attention": Case(attention, precision="use_amp"),
    "wrap_scaler": Case(convolutions, precision="wrap_scaler", overflow_at=5),
    "wrap_scaler_aggregation": Case(precision="wrap_scaler", clip=0.5, aggregation=3),
    "bfloat16": Case(convolutions, precision="bfloat16"),
}


def trial(case: Case) -> type[Trial]:
    class OfCase(Trial):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.scaler = None
            if case.precision == "use_amp":
                context.experimental.use_amp()
            elif case.precision == "wrap_scaler":
                scaler = torch.amp.GradScaler(context.device.type, init_scale=2.0**10, growth_interval=3)
                self.scaler = context.wrap_scaler(scaler)
            self.model = context.wrap_model(case.network())
            adam = torch.optim.Adam(self.model.parameters(), lr=0.01, fused=case.fused or None)
            self.optimizer = context.wrap_optimizer(adam)

        def build_training_data_loader(self) -> Any:
            images = torch.randn(SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
            data = torch.utils.data.TensorDataset(images, images.mean((1, 2, 3))[:, None])
            pinned = {"num_workers": case.workers, "pin_memory": True} if case.workers else {}
            return self.api.DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, **pinned)

        build_validation_data_loader = build_training_data_loader

        def loss(self, batch: Any) -> torch.Tensor:
            dtype = {"bfloat16": torch.bfloat16, "wrap_scaler": torch.float16}.get(case.precision)
            type_ = self.context.device.type
            with torch.autocast(type_, dtype) if dtype else contextlib.nullcontext():
                return ((self.model(batch[0]).float() - batch[1]) ** 2).mean()

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = self.loss(batch) * (float("inf") if batch_idx == case.overflow_at else 1.0)
            is_last = (batch_idx + 1) % case.aggregation == 0
            self.context.backward(loss if self.scaler is None else self.scaler.scale(loss))
            if self.scaler is not None and case.clip and is_last:
                self.scaler.unscale_(self.optimizer)
            limit = case.clip
            clip = (lambda p: nn.utils.clip_grad_norm_(p, limit)) if limit else None
            self.context.step_optimizer(self.optimizer, clip_grads=clip, scaler=self.scaler)
            if self.scaler is not None and is_last:
                self.scaler.update()
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:
            return {"validation_loss": self.loss(batch)}

    return OfCase


@pytest.fixture(autouse=True)
def deterministic(device: str) -> Iterator[None]:
    """Let torch choose kernels that repeat their results; skip the CPU where a trial would take a GPU."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("a trial takes the GPU that is here; hide it with CUDA_VISIBLE_DEVICES= to compare on the CPU")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_same_as_repeatable(real: Trace, again: Trace, ours: Trace) -> None:
    """Compare ours with the real one up to where the real one differs from itself; from there on it is not compared."""
    alike = next((i for i, pair in enumerate(zip(real.events, again.events, strict=False)) if pair[0] != pair[1]), None)
    if alike is None and (real.final, real.checkpoints) == (again.final, again.checkpoints):
        assert_same(real, ours)
        return
    assert ours.events[:alike] == real.events[:alike]
    where = "after its last event" if alike is None else f"at event {alike} of {len(real.events)}"
    pytest.skip(f"not compared to the end: the real Determined differs from itself {where}")


def compare_three(trial: type[Trial], **arguments: Any) -> None:
    sides = ("determined", "determined", "det_lightning")
    assert_same_as_repeatable(*(run(side, trial, **arguments) for side in sides))


def periods(batches: int = BATCHES) -> dict[str, Any]:
    """Validations and checkpoints every four batches: in the middle of an aggregation over three."""
    return {
        "max_length": batches,
        "checkpoint_policy": "none",
        "checkpoint_period": PERIOD,
        "validation_period": PERIOD,
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_is_the_same(case: Case) -> None:
    compare_three(trial(case), init={"aggregation_frequency": case.aggregation}, **periods())


def test_several_models_train_the_same() -> None:
    compare_three(Adversarial, **periods())


def newest_checkpoint() -> str:
    storage = Path(os.environ["XDG_DATA_HOME"], "determined")
    return max(storage.glob("*/metadata.json"), key=lambda path: path.stat().st_mtime_ns).parent.name


@pytest.mark.parametrize("case", ["use_amp", "pinned_workers", "wrap_scaler"])
def test_a_resumed_run_ends_as_a_straight_one_of_the_real(case: str) -> None:
    make = trial(CASES[case])
    straight, again = (run("determined", make, **periods()) for _ in range(2))
    run("det_lightning", make, **periods(PERIOD + 3))
    resumed = run("det_lightning", make, trial_seed=99, latest_checkpoint=newest_checkpoint(), **periods())
    if straight.final != again.final:
        pytest.skip("not compared: the real Determined differs from itself")
    assert resumed.final == straight.final


def test_the_real_one_goes_on_from_ours() -> None:
    make, traces = trial(CASES["use_amp"]), []
    for writer in ("determined", "determined", "det_lightning"):
        run(writer, make, **periods(PERIOD))
        traces.append(run("determined", make, latest_checkpoint=newest_checkpoint(), **periods()))
    assert_same_as_repeatable(*traces)
