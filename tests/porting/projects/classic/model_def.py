import torch
from torch import nn

from determined.pytorch import DataLoader, PyTorchTrial, PyTorchTrialContext

from data import loader


class PriceTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        hidden = context.get_hparam("hidden")
        self.model = context.wrap_model(nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 1)))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=context.get_hparam("lr"))
        self.optimizer = context.wrap_optimizer(optimizer)

    def build_training_data_loader(self) -> DataLoader:
        return loader(0, self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self) -> DataLoader:
        return loader(1, self.context.get_per_slot_batch_size())

    def train_batch(self, batch, epoch_idx, batch_idx):
        numbers, prices = batch
        loss = nn.functional.mse_loss(self.model(numbers)[:, 0], prices)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        numbers, prices = batch
        return {"error": nn.functional.l1_loss(self.model(numbers)[:, 0], prices)}
