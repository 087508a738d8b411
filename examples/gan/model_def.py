"""A generative adversarial network that learns to draw points on a ring of eight clusters."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from det_lightning import pytorch

CLUSTERS = 8
NOISE_SIZE = 8


def sample_ring(count: int, seed: int) -> torch.Tensor:
    """Return points of eight small clusters on a circle of radius 2."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.randint(CLUSTERS, (count,), generator=generator) * (2 * math.pi / CLUSTERS)
    centers = 2 * torch.stack([angle.cos(), angle.sin()], dim=1)
    return centers + 0.1 * torch.randn(count, 2, generator=generator)


def energy_distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the energy distance of two samples of points; 0 if they have the same distribution."""
    return 2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean()


def build_network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, outputs)
    )


class Distances(pytorch.PyTorchCallback):
    """Record the result of each validation."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.values.append(metrics["energy_distance"])

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict["values"]


class RingGANTrial(pytorch.PyTorchTrial):
    """Two models with an optimizer each. Hyperparameters: ``lr``, ``global_batch_size``."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.generator = context.wrap_model(build_network(NOISE_SIZE, 2))
        self.discriminator = context.wrap_model(build_network(2, 1))
        self.generator_optimizer = self._wrap_optimizer(self.generator)
        self.discriminator_optimizer = self._wrap_optimizer(self.discriminator)
        self.distances = Distances()

    def _wrap_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        adam = torch.optim.Adam(model.parameters(), lr=self.context.get_hparam("lr"), betas=(0.5, 0.9))
        return self.context.wrap_optimizer(adam)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        points = TensorDataset(sample_ring(64_000, seed=0))
        return pytorch.DataLoader(points, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(TensorDataset(sample_ring(2000, seed=1)), batch_size=2000)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"distances": self.distances}

    def generate(self, count: int) -> torch.Tensor:
        return self.generator(self.context.to_device(torch.randn(count, NOISE_SIZE)))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        """Train both models. The trial chooses the order; here it alternates."""
        (real,) = batch
        steps = [self._train_generator, self._train_discriminator]
        if batch_idx % 2 == 1:
            steps.reverse()
        return dict(step(real) for step in steps)

    def _train_generator(self, real: torch.Tensor) -> tuple[str, torch.Tensor]:
        self.discriminator.requires_grad_(False)  # this loss trains the generator only
        loss = softplus(-self.discriminator(self.generate(len(real)))).mean()
        self.context.backward(loss)
        self.discriminator.requires_grad_(True)
        self.context.step_optimizer(self.generator_optimizer)
        return "generator_loss", loss

    def _train_discriminator(self, real: torch.Tensor) -> tuple[str, torch.Tensor]:
        fake = self.generate(len(real)).detach()
        loss = softplus(-self.discriminator(real)).mean() + softplus(self.discriminator(fake)).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.discriminator_optimizer)
        return "discriminator_loss", loss

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, float]:
        real = self.context.to_device(torch.cat([points for (points,) in data_loader]))
        return {"energy_distance": energy_distance(self.generate(len(real)), real).item()}
