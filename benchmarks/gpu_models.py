"""The models and the data of benchmarks/gpu.py: all data are made, nothing is downloaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Residual(nn.Module):
    """Two convolutions with a shortcut around them, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        shortcut = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.shortcut = nn.Sequential(*shortcut) if (inputs, stride) != (outputs, 1) else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def resnet18(smoke: bool) -> nn.Module:
    """Return ResNet-18 for images of 32 by 32: 11.2 M parameters."""
    width = 8 if smoke else 64
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    for index in range(4):
        layers += [
            Residual(widths[index], widths[index + 1], 1 if index == 0 else 2),
            Residual(widths[index + 1], widths[index + 1], 1),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


class Transformer(nn.Module):
    """A decoder that predicts each token from those before it: 25.3 M parameters."""

    def __init__(self, smoke: bool) -> None:
        super().__init__()
        width, layers = (32, 1) if smoke else (512, 6)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, width // 16, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, VOCABULARY, bias=False)
        self.out.weight = self.embedding.weight if smoke else self.out.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.position
        mask = self.mask.to(hidden.dtype)
        return self.out(self.layers(hidden, mask=mask, is_causal=True)).flatten(0, 1)


VOCABULARY, LENGTH = 6144, 128
_SMOKE_BATCH = 4


def perceptron(smoke: bool) -> nn.Module:
    """Return a network that is done with a batch sooner than the host has the next one ready."""
    width = 16 if smoke else 512
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


class Slices(torch.utils.data.Dataset[Any]):
    """Samples in two tensors; neighbours come as a batch, without a copy."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._inputs = inputs
        self._targets = targets

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(indices[0], indices[-1] + 1)
        return self._inputs[rows], self._targets[rows]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs[index], self._targets[index]


def as_it_is(batch: Any) -> Any:
    """Collate a batch of ``Slices``."""
    return batch


@dataclasses.dataclass(frozen=True)
class Task:
    """A model with its data and loss.

    Attributes:
        make_model: returns the model; a tiny one if asked to.
        make_data: returns a number of samples on a device.
        batch_size: samples of a batch.
        precisions: precisions that are measured.
        workers: None for data on the device; 0 for data in main memory; otherwise workers that load into pinned memory.
        repeat: batches per batch of the command line, for models that need little time.
        records: whether the systems write TensorBoard files with ten metrics, report and validate every 20 batches; the
            plain loop only validates.
    """

    make_model: Callable[[bool], nn.Module]
    make_data: Callable[[int, torch.device], Slices]
    batch_size: int
    precisions: tuple[str, ...] = ("float32", "amp", "O1", "O2")
    workers: int | None = None
    repeat: int = 1
    records: bool = False

    def size(self, smoke: bool) -> int:
        return _SMOKE_BATCH if smoke else self.batch_size


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy, in float32."""
    return nn.functional.cross_entropy(outputs.float(), targets.flatten())


def _images(count: int, device: torch.device) -> Slices:
    """Return images like those of CIFAR-10: each class has a pattern of its own under the noise."""
    labels = torch.arange(count, device=device) % 10
    patterns = torch.randn(10, 3, 32, 32, device=device)
    return Slices(patterns[labels] + torch.randn(count, 3, 32, 32, device=device), labels)


def _texts(count: int, device: torch.device) -> Slices:
    tokens = torch.randint(VOCABULARY, (count, LENGTH // 2 + 1), device=device)
    repeated = torch.cat([tokens, tokens], dim=1)
    return Slices(repeated[:, :LENGTH].contiguous(), repeated[:, 1 : LENGTH + 1].contiguous())


def _rows(count: int, device: torch.device) -> Slices:
    return Slices(torch.randn(count, 64, device=device), torch.arange(count, device=device) % 10)


_MIXED = ("float32", "amp")

TASKS = {
    "ResNet-18": Task(resnet18, _images, 256),
    "ResNet-18, four workers": Task(resnet18, _images, 256, _MIXED, workers=4),
    "ResNet-18, recording": Task(resnet18, _images, 256, _MIXED, records=True),
    "transformer": Task(Transformer, _texts, 64),
    "MLP": Task(perceptron, _rows, 64, (*_MIXED, "compiled"), repeat=20),
    "MLP, from the host": Task(perceptron, _rows, 64, _MIXED, workers=0, repeat=20),
}
