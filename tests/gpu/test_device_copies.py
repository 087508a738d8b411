"""Batches that workers load are copied to the GPU beside its work: with the same numbers, and nothing waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import pytorch

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BATCHES, BATCH_SIZE, WARM_UP = 40, 64, 3


class FromWorkers(pytorch.PyTorchTrial):
    """Workers load the data."""

    prefetch = True

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.losses: list[torch.Tensor] = []
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Dropout(0.2), torch.nn.Linear(512, 1))
        self.model = context.wrap_model(network)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

    def make_loader(self) -> pytorch.DataLoader:
        inputs = torch.randn(BATCH_SIZE * 16, 256, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        return pytorch.DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=2, prefetch=self.prefetch)

    build_training_data_loader = build_validation_data_loader = make_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == WARM_UP:
            torch.cuda.set_sync_debug_mode("error")
        loss = ((self.model(batch[0]) - batch[1]) ** 2).mean()
        self.losses.append(loss.detach())
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        if batch_idx == BATCHES - 1:
            torch.cuda.set_sync_debug_mode("default")
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"validation_loss": ((self.model(batch[0]) - batch[1]) ** 2).mean()}


class InTurn(FromWorkers):
    prefetch = False


def losses_of(kind: type[FromWorkers], storage: Path) -> torch.Tensor:
    with pytorch.init(exp_conf={"name": "gpu"}, enable_tensorboard_logging=False) as context:
        trial = kind(context)
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False)
        end = pytorch.Batch(BATCHES)
        try:
            trainer.fit(max_length=end, reporting_period=end, checkpoint_policy="none", checkpoint_storage=storage)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return torch.stack(trial.losses).cpu()


def test_losses_are_the_same_and_no_batch_waits(tmp_path: Path) -> None:
    assert torch.equal(losses_of(FromWorkers, tmp_path / "aside"), losses_of(InTurn, tmp_path / "in turn"))
