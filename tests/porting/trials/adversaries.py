"""Two models with an optimizer each, one of them stepped less often, as in the examples for GANs."""

from collections import OrderedDict

import torch
from determined import pytorch
from determined.pytorch import PyTorchTrial
from torch import nn
from torch.utils.data import TensorDataset


class Generator(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(OrderedDict(first=nn.Linear(size, 8), relu=nn.ReLU(), last=nn.Linear(8, 2)))

    def forward(self, noise):
        return self.layers(noise)


class AdversariesTrial(PyTorchTrial):
    def __init__(self, trial_context: pytorch.PyTorchTrialContext) -> None:
        self.context = trial_context
        self.hparams = self.context.get_hparams()
        self.generator = self.context.wrap_model(Generator(self.hparams["noise"]))
        self.discriminator = self.context.wrap_model(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
        self.opt_g = self.context.wrap_optimizer(torch.optim.Adam(self.generator.parameters(), self.hparams["lr"]))
        self.opt_d = self.context.wrap_optimizer(torch.optim.Adam(self.discriminator.parameters(), self.hparams["lr"]))
        self.criterion = nn.BCEWithLogitsLoss()

    def build_training_data_loader(self):
        points = torch.randn(24, 2, generator=torch.Generator().manual_seed(3))
        return pytorch.DataLoader(TensorDataset(points, points.flip(0)), self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self):
        points = torch.randn(12, 2, generator=torch.Generator().manual_seed(4))
        return pytorch.DataLoader(TensorDataset(points, points), batch_size=self.context.get_per_slot_batch_size())

    def judge(self, points, real: bool):
        logits = self.discriminator(points)
        return self.criterion(logits, torch.full_like(logits, float(real)))

    def train_batch(self, batch, epoch_idx, batch_idx):
        real, noise = batch
        self.discriminator.requires_grad_(False)
        generator_loss = self.judge(self.generator(noise), True)
        self.context.backward(generator_loss)
        self.context.step_optimizer(self.opt_g)

        self.discriminator.requires_grad_(True)
        losses = [self.judge(real, True), self.judge(self.generator(noise).detach(), False)]
        discriminator_loss = sum(losses) / len(losses)
        if batch_idx % 2 == 0:
            self.context.backward(discriminator_loss)
            self.context.step_optimizer(self.opt_d)
        return {"loss": discriminator_loss, "g_loss": generator_loss.item(), "d_loss": discriminator_loss.item()}

    def evaluate_batch(self, batch):
        real, noise = batch
        return {
            "real_score": self.discriminator(real).mean(),
            "fake_score": self.discriminator(self.generator(noise)).mean(),
        }
