import math
import os

import torch


def moons(samples, seed):
    """Points of two half circles that reach into each other, and the number of the half circle."""
    generator = torch.Generator().manual_seed(seed)
    noise = float(os.environ.get("MOONS_NOISE", "0.1"))
    labels = torch.arange(samples) % 2
    angle = math.pi * torch.rand(samples, generator=generator)
    upper = torch.stack([angle.cos(), angle.sin()], dim=1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
    points = torch.where(labels[:, None] == 0, upper, lower)
    points = points + noise * torch.randn(samples, 2, generator=generator)
    return torch.utils.data.TensorDataset(points, labels)
