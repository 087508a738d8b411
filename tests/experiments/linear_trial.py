"""An unmodified Determined trial, small enough to train in no time."""

# mypy: ignore-errors

from typing import Any

import torch
from determined import InvalidHP, pytorch


class LinearTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(4, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr")))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        return pytorch.DataLoader(data, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 5 and self.context.get_hparams().get("invalid_on") == self.context.distributed.rank:
            raise InvalidHP("not these")
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"validation_loss": self.loss(batch)}

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return (self.model(inputs) - targets).square().mean()


class Trials:
    Linear = LinearTrial
