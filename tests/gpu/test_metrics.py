"""The metrics of a workload on a GPU come to the host together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from det_lightning import pytorch
from det_lightning.engine.metrics import MetricWindow

pytestmark = pytest.mark.gpu


def test_metrics_of_each_type_and_shape_take_one_transfer() -> None:
    window = MetricWindow()
    for number in range(100):
        value = torch.tensor(float(number), device="cuda")
        window.add({"loss": value, "half": value.half(), "count": value.long(), "vector": value.expand(3)})
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        batches = window.close()
    transfers = [event for event in profiled.events() or [] if "Memcpy DtoH" in event.name]
    assert len(transfers) == 4
    assert [float(batch["loss"]) for batch in batches] == [float(number) for number in range(100)]
    assert batches[7]["vector"].tolist() == [7.0] * 3


class Watched(pytorch.PyTorchTrial):
    """A batch that waits for the device is an error, from the twelfth on; a report after every fifth waits."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(16, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(1)).to(self.context.device)
        return pytorch.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx >= 12:
            torch.cuda.set_sync_debug_mode("error")
        loss = ((self.model(batch[0]) - batch[1]) ** 2).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        if batch_idx % 5 == 4:
            torch.cuda.set_sync_debug_mode("default")
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"validation_loss": ((self.model(batch[0]) - batch[1]) ** 2).mean()}


@pytest.mark.slow
def test_no_batch_waits_for_metrics(tmp_path: Path) -> None:
    with pytorch.init(exp_conf={"name": "gpu"}, enable_tensorboard_logging=False) as context:
        trainer = pytorch.Trainer(Watched(context), context, enable_progress_bar=False)
        end = pytorch.Batch(30)
        period = pytorch.Batch(5)
        try:
            trainer.fit(max_length=end, reporting_period=period, checkpoint_policy="none", checkpoint_storage=tmp_path)
        finally:
            torch.cuda.set_sync_debug_mode("default")
