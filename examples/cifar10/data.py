"""Small colour images of ten classes: patterns that are made here, or CIFAR-10 from a directory."""

import math
import pathlib
from collections.abc import Callable

import torch
from torch.utils.data import TensorDataset

SIZE = 32
RECORD_BYTES = 1 + 3 * SIZE * SIZE  # CIFAR-10: the class, then all red, all green and all blue values
REAL_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def load(source: str) -> tuple[TensorDataset, TensorDataset, list[str]]:
    """Return the images for training and for validation, and the names of the classes.

    The images are ``(n, 3, 32, 32)`` of type uint8, the classes ``(n,)``.

    Args:
        source: "made" for 2000 and 500 patterns; otherwise the directory of CIFAR-10's binary version.

    Raises:
        FileNotFoundError: the directory, or one of its files, does not exist.
        ValueError: a file is not one of CIFAR-10's.
    """
    if source == "made":
        return make_patterns(2000, seed=0), make_patterns(500, seed=1), list(PATTERNS)
    directory = pathlib.Path(source).expanduser()
    training = _read_batches(directory, [f"data_batch_{number}.bin" for number in range(1, 6)])
    return training, _read_batches(directory, ["test_batch.bin"]), REAL_CLASSES


def _read_batches(directory: pathlib.Path, names: list[str]) -> TensorDataset:
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"{directory} has no {', '.join(missing)}; data.source names the directory of CIFAR-10's binary version"
        )
    records = torch.cat([_read_records(directory / name) for name in names])
    return TensorDataset(records[:, 1:].reshape(-1, 3, SIZE, SIZE), records[:, 0].long())


def _read_records(file: pathlib.Path) -> torch.Tensor:
    content = bytearray(file.read_bytes())
    if not content or len(content) % RECORD_BYTES:
        raise ValueError(f"{file} has {len(content)} bytes, which are not whole records of {RECORD_BYTES} bytes")
    return torch.frombuffer(content, dtype=torch.uint8).view(-1, RECORD_BYTES)


# Each pattern is the inside of a figure: of coordinates (n, 32, 32) about its centre, in units of its size.
PATTERNS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "disc": lambda x, y: x.hypot(y) < 1,
    "ring": lambda x, y: (x.hypot(y) - 0.9).abs() < 0.25,
    "square": lambda x, y: torch.maximum(x.abs(), y.abs()) < 0.9,
    "triangle": lambda x, y: (y < 0.8) & (x.abs() < (y + 1) / 1.8),
    "cross": lambda x, y: (torch.minimum(x.abs(), y.abs()) < 0.3) & (torch.maximum(x.abs(), y.abs()) < 1.1),
    "rows": lambda x, y: (5 * y).sin() > 0,
    "columns": lambda x, y: (5 * x).sin() > 0,
    "diagonals": lambda x, y: (4 * (x + y)).sin() > 0,
    "checks": lambda x, y: (4 * x).sin() * (4 * y).sin() > 0,
    "dots": lambda x, y: (6 * x).sin() * (6 * y).sin() > 0.4,
}


def make_patterns(count: int, seed: int) -> TensorDataset:
    """Return images of the patterns in random sizes, places and colours, with noise; the same ones for a seed."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.arange(count) % len(PATTERNS)
    axis = torch.linspace(-1, 1, SIZE)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    size = uniform(0.45, 0.8, 1, 1)
    angle = uniform(-math.pi / 12, math.pi / 12, 1, 1)
    right = (axis.view(1, 1, SIZE) - uniform(-0.25, 0.25, 1, 1)) / size
    down = (axis.view(1, SIZE, 1) - uniform(-0.25, 0.25, 1, 1)) / size
    x = right * angle.cos() + down * angle.sin()
    y = down * angle.cos() - right * angle.sin()
    inside = torch.stack([PATTERNS[name](x, y) for name in PATTERNS])[classes, torch.arange(count)].unsqueeze(1)
    ground = uniform(0.0, 1.0, 3, 1, 1)
    # Each colour of the figure is far from that of the ground.
    figure = (ground + uniform(0.3, 0.7, 3, 1, 1)) % 1
    noise = 0.2 * torch.randn(count, 3, SIZE, SIZE, generator=generator)
    images = torch.where(inside, figure, ground) + noise
    return TensorDataset((255 * images.clamp(0, 1)).to(torch.uint8), classes)
