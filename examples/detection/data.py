"""Images with boxes: figures that are drawn here, or COCO from a directory."""

import json
import math
import pathlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

FIGURES = ["disc", "square", "triangle"]


def load(source: str, size: int) -> tuple[Dataset, Dataset, list[str]]:
    """Return the images for training and for validation, and the names of the classes.

    A sample is an image ``(3, size, size)`` of type uint8, boxes ``(n, 4)`` in pixels, and classes ``(n,)`` from 1.

    Args:
        source: "made" for 480 and 120 drawings; otherwise COCO's directory, with ``annotations``, ``train2017`` and
            ``val2017``.
        size: height and width of the images. Those of COCO are made smaller, and filled up to a square.

    Raises:
        FileNotFoundError: the directory, or a file of its annotations, does not exist.
    """
    if source == "made":
        return Drawings(480, size, first_seed=0), Drawings(120, size, first_seed=1_000_000), FIGURES
    directory = pathlib.Path(source).expanduser()
    training = Coco(directory, "train2017", size)
    return training, Coco(directory, "val2017", size), training.class_names


def collate(samples: Sequence[Sample]) -> Sample:
    """Stack samples; rows with class 0 fill up the boxes of images that have fewer than others."""
    most = max(len(boxes) for _, boxes, _ in samples)
    images = torch.stack([image for image, _, _ in samples])
    boxes = torch.stack([torch.nn.functional.pad(boxes, (0, 0, 0, most - len(boxes))) for _, boxes, _ in samples])
    classes = torch.stack([torch.nn.functional.pad(classes, (0, most - len(classes))) for _, _, classes in samples])
    return images, boxes, classes


class Drawings(Dataset):
    """Discs, squares and triangles in any colour on noise, one to three in an image; image n is always the same."""

    def __init__(self, count: int, size: int, first_seed: int) -> None:
        self.samples = [self._draw(torch.Generator().manual_seed(first_seed + n), size) for n in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def _draw(self, generator: torch.Generator, size: int) -> Sample:
        def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
            return low + (high - low) * torch.rand(*shape, generator=generator)

        image = uniform(0.2, 0.8, 3, 1, 1) + 0.08 * torch.randn(3, size, size, generator=generator)
        across = torch.arange(size) + 0.5
        boxes, classes = [], []
        for _ in range(int(torch.randint(1, 4, (), generator=generator))):
            side = float(uniform(0.2 * size, 0.45 * size, 1))
            left, top = uniform(0, size - side, 2).tolist()
            kind = int(torch.randint(len(FIGURES), (), generator=generator))
            x = (across.view(1, -1) - left) / side * 2 - 1
            y = (across.view(-1, 1) - top) / side * 2 - 1
            image = torch.where(self._inside(kind, x, y), uniform(0, 1, 3, 1, 1), image)
            boxes.append([left, top, left + side, top + side])
            classes.append(1 + kind)
        return (255 * image.clamp(0, 1)).to(torch.uint8), torch.tensor(boxes), torch.tensor(classes)

    def _inside(self, kind: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if FIGURES[kind] == "disc":
            return torch.hypot(x, y) < 1
        if FIGURES[kind] == "square":
            return torch.maximum(x.abs(), y.abs()) < 1
        return (y.abs() < 1) & (x.abs() < (y + 1) / 2)


class Coco(Dataset):
    """The images of one part of COCO that have boxes; groups that were outlined as one are left out."""

    def __init__(self, directory: pathlib.Path, part: str, size: int) -> None:
        with (directory / "annotations" / f"instances_{part}.json").open() as file:
            content = json.load(file)
        self.folder = directory / part
        self.size = size
        self.class_names = [category["name"] for category in content["categories"]]
        number = {category["id"]: index for index, category in enumerate(content["categories"], 1)}
        self.objects = defaultdict(list)
        for annotation in content["annotations"]:
            if not annotation.get("iscrowd"):
                self.objects[annotation["image_id"]].append((annotation["bbox"], number[annotation["category_id"]]))
        self.images = [image for image in content["images"] if image["id"] in self.objects]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        entry = self.images[index]
        with Image.open(self.folder / entry["file_name"]) as image:
            scale = self.size / max(image.size)
            width, height = (max(1, math.floor(scale * side)) for side in image.size)
            pixels = np.array(image.convert("RGB").resize((width, height)))
        square = torch.zeros(3, self.size, self.size, dtype=torch.uint8)
        square[:, :height, :width] = torch.from_numpy(pixels).permute(2, 0, 1)
        corners = [[x, y, x + w, y + h] for (x, y, w, h), _ in self.objects[entry["id"]]]
        classes = [number for _, number in self.objects[entry["id"]]]
        return square, torch.tensor(corners, dtype=torch.float32) * scale, torch.tensor(classes)
