"""Waves whose next value is to be foretold, kept in a file as a large data set would be."""

import math
import pathlib

import torch
from torch.utils.data import TensorDataset

SERIES = 1500
VALIDATION = 300
LENGTH = 24


def prepare(directory: pathlib.Path) -> None:
    """Write the waves to a file. What a real project downloads or unpacks; one process of each machine does it."""
    generator = torch.Generator().manual_seed(0)
    period = 5 + 15 * torch.rand(SERIES, 1, generator=generator)
    phase = 2 * math.pi * torch.rand(SERIES, 1, generator=generator)
    waves = (2 * math.pi * torch.arange(LENGTH + 1) / period + phase).sin()
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(waves + 0.05 * torch.randn(waves.shape, generator=generator), directory / "waves.pt")


def load(directory: pathlib.Path) -> tuple[TensorDataset, TensorDataset]:
    """Return waves for training and for validation: ``(n, 24)`` values, and the value after them ``(n,)``."""
    waves = torch.load(directory / "waves.pt", weights_only=True)
    values = waves[:, :-1]
    following = waves[:, -1]
    return (
        TensorDataset(values[VALIDATION:], following[VALIDATION:]),
        TensorDataset(values[:VALIDATION], following[:VALIDATION]),
    )
