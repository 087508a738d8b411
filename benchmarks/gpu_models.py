"""The models and the data of benchmarks/gpu.py, made on the device: nothing is loaded, and nothing downloaded."""

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


class OnDevice(torch.utils.data.Dataset[Any]):
    """Samples on the device; neighbours come as a batch, without a copy through main memory."""

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
    """Collate what ``OnDevice`` returns."""
    return batch


@dataclasses.dataclass(frozen=True)
class Task:
    """A model with its data and loss; ``batch_size`` samples of ``unit`` per batch."""

    make_model: Callable[[bool], nn.Module]
    make_data: Callable[[int, torch.device], OnDevice]
    batch_size: int
    unit: str

    def size(self, smoke: bool) -> int:
        return _SMOKE_BATCH if smoke else self.batch_size


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy, in float32."""
    return nn.functional.cross_entropy(outputs.float(), targets.flatten())


def _images(count: int, device: torch.device) -> OnDevice:
    """Return images like those of CIFAR-10: each class has a pattern of its own under the noise."""
    labels = torch.arange(count, device=device) % 10
    patterns = torch.randn(10, 3, 32, 32, device=device)
    return OnDevice(patterns[labels] + torch.randn(count, 3, 32, 32, device=device), labels)


def _texts(count: int, device: torch.device) -> OnDevice:
    tokens = torch.randint(VOCABULARY, (count, LENGTH // 2 + 1), device=device)
    repeated = torch.cat([tokens, tokens], dim=1)
    return OnDevice(repeated[:, :LENGTH].contiguous(), repeated[:, 1 : LENGTH + 1].contiguous())


TASKS = {
    "ResNet-18": Task(resnet18, _images, 256, "images"),
    "transformer": Task(Transformer, _texts, 64, "sequences"),
}
