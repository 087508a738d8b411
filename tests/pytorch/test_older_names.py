"""Names that trials of old releases import, and today's Determined does not have any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from det_lightning import pytorch
from det_lightning.testing import run_trial


class Regression(pytorch.PyTorchTrial):
    clip: Callable[[], pytorch.PyTorchCallback | None] = staticmethod(lambda: None)

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(2, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=1.0))
        self.norms: list[float] = []

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        callback = self.clip()
        return {} if callback is None else {"clip": callback}

    def build_training_data_loader(self) -> Any:
        data: Any = 100 * torch.eye(2).repeat(4, 1)
        return pytorch.DataLoader(data, batch_size=2)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        before = [p.detach().clone() for p in self.model.parameters()]
        loss = self.model(batch).pow(2).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(self.model.parameters(), before, strict=True)])
        left = self.context._epoch_len
        return {"loss": loss, "norm": moved.norm(), "largest": moved.abs().max(), "epoch_len": left}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"validation_loss": self.model(batch).pow(2).mean()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "clipping"),
    [("norm", pytorch.ClipGradsL2Norm), ("largest", pytorch.ClipGradsL2Value)],
)
@pytest.mark.filterwarnings("ignore:Callback 'clip' overrides on_before_optimizer_step")
def test_callbacks_clip_each_step(metric: str, clipping: Any) -> None:
    class Clipped(Regression):
        clip = staticmethod(lambda: clipping(0.25))

    free, clipped = run_trial(Regression, batches=3), run_trial(Clipped, batches=3)
    assert free.metrics[0][metric] > 1
    assert [metrics[metric] for metrics in clipped.metrics] == pytest.approx([0.25] * 3, rel=1e-4)


def test_the_length_of_an_epoch() -> None:
    assert run_trial(Regression, batches=2).metrics[0]["epoch_len"] == 4


def test_reset_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 1), torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(2, 1)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pytorch.reset_parameters(model)
    assert all((model.state_dict()[name] != value).all() for name, value in before.items())
