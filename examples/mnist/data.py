"""Handwritten digits, 28 by 28 pixels: scikit-learn's, or MNIST from a directory."""

import gzip
import pathlib

import torch
from torch.utils.data import TensorDataset

HELD_OUT = 360  # of scikit-learn's 1797 images


def load(source: str) -> tuple[TensorDataset, TensorDataset]:
    """Return the images for training and for validation, each ``(n, 1, 28, 28)`` from 0 to 1, with their classes.

    Args:
        source: "digits" for the 1797 small images that come with scikit-learn, enlarged; otherwise a directory with
            the four files of MNIST, packed or not, such as ``train-images-idx3-ubyte.gz``.

    Raises:
        FileNotFoundError: the directory, or one of its files, does not exist.
        ValueError: a file is not one of MNIST's.
    """
    if source == "digits":
        return _load_digits()
    directory = pathlib.Path(source).expanduser()
    return _load_pair(directory, "train"), _load_pair(directory, "t10k")


def _load_digits() -> tuple[TensorDataset, TensorDataset]:
    from sklearn.datasets import load_digits  # only needed without MNIST itself

    pixels, labels = load_digits(return_X_y=True)
    images = (torch.tensor(pixels, dtype=torch.float32) / 16).view(-1, 1, 8, 8)
    # 8 by 8 pixels become 20 by 20 in a frame of 4, which is how MNIST's digits lie in their images.
    larger = torch.nn.functional.interpolate(images, size=20, mode="bilinear", align_corners=False)
    framed = torch.nn.functional.pad(larger, (4, 4, 4, 4))
    order = torch.randperm(len(framed), generator=torch.Generator().manual_seed(0))
    held_out, kept = order[:HELD_OUT], order[HELD_OUT:]
    classes = torch.tensor(labels)
    return TensorDataset(framed[kept], classes[kept]), TensorDataset(framed[held_out], classes[held_out])


def _load_pair(directory: pathlib.Path, prefix: str) -> TensorDataset:
    images = _read_idx(directory, f"{prefix}-images-idx3-ubyte", dimensions=3)
    labels = _read_idx(directory, f"{prefix}-labels-idx1-ubyte", dimensions=1)
    return TensorDataset(images.unsqueeze(1).float() / 255, labels.long())


def _read_idx(directory: pathlib.Path, name: str, dimensions: int) -> torch.Tensor:
    """Read an array of bytes: two zeros, the type, the number of dimensions, each size in four bytes, the values."""
    packed = directory / f"{name}.gz"
    file = packed if packed.exists() else directory / name
    if not file.exists():
        raise FileNotFoundError(f"{directory} has neither {name} nor {name}.gz; data.source names MNIST's directory")
    content = gzip.decompress(file.read_bytes()) if file == packed else file.read_bytes()
    start = 4 + 4 * dimensions
    sizes = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    values = torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8) if len(content) > start else torch.empty(0)
    if content[:4] != bytes([0, 0, 8, dimensions]) or values.numel() != torch.Size(sizes).numel():
        raise ValueError(f"{file} is not a whole IDX file of bytes with {dimensions} dimension(s)")
    return values.view(sizes)
