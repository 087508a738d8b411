"""A small detector of two stages, in the manner of Faster R-CNN (Ren et al., 2015).

The first stage finds boxes that hold anything, the second one says what they hold and moves their edges.
"""

from typing import NamedTuple

import torch
from boxes import decode, encode, overlap, suppress
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, grid_sample, smooth_l1_loss

STRIDE = 8  # pixels of the image for each place of the features
CELLS = 5  # a box is seen through a grid of 5 by 5 features


class Detection(NamedTuple):
    """What was found in an image: boxes ``(n, 4)`` in pixels, classes ``(n,)`` from 1, scores ``(n,)``, best first."""

    boxes: torch.Tensor
    classes: torch.Tensor
    scores: torch.Tensor


def build_backbone(width: int) -> nn.Module:
    """Return a network from images ``(n, 3, s, s)`` to features ``(n, 4 * width, s / 8, s / 8)``."""
    layers: list[nn.Module] = []
    channels = 3
    for outputs, stride in [(width, 2), (2 * width, 2), (4 * width, 2), (4 * width, 1)]:
        layers += [nn.Conv2d(channels, outputs, 3, stride, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]
        channels = outputs
    return nn.Sequential(*layers)


class Detector(nn.Module):
    """Losses for images with boxes, and detections for images without."""

    anchors: torch.Tensor

    def __init__(self, classes: int, image_size: int, width: int, anchor_sizes: list[int], proposals: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.proposals = proposals
        channels = 4 * width
        self.backbone = build_backbone(width)
        self.search = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())
        self.search_outputs = nn.Conv2d(channels, 5 * len(anchor_sizes), kernel_size=1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(channels * CELLS * CELLS, 128), nn.ReLU())
        self.head_outputs = nn.Linear(128, 4 + 1 + classes)
        self.register_buffer("anchors", make_anchors(image_size, anchor_sizes), persistent=False)

    def forward(
        self, images: torch.Tensor, boxes: torch.Tensor | None = None, classes: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor] | list[Detection]:
        """Return the losses by name if there are boxes ``(n, m, 4)`` and classes ``(n, m)``, otherwise detections."""
        features = self.backbone(images.float() / 127.5 - 1)
        found = self.search_outputs(self.search(features))
        # For each place and anchor four offsets and a score.
        found = found.permute(0, 2, 3, 1).reshape(len(images), -1, 5)
        offsets, scores = found[..., :4], found[..., 4]
        candidates = [self._propose(*image) for image in zip(offsets.detach(), scores.detach(), strict=True)]
        if boxes is None or classes is None:
            return [self._detect(features[n : n + 1], kept) for n, kept in enumerate(candidates)]
        losses = []
        for n, kept in enumerate(candidates):
            real = boxes[n][classes[n] > 0]
            first = self._first_losses(offsets[n], scores[n], real)
            second = self._second_losses(features[n : n + 1], torch.cat([kept, real]), real, classes[n][classes[n] > 0])
            losses.append({**first, **second})
        return {name: torch.stack([image[name] for image in losses]).mean() for name in losses[0]}

    def _propose(self, offsets: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the best boxes of the first stage."""
        best = scores.topk(min(4 * self.proposals, len(scores))).indices
        boxes = decode(offsets[best], self.anchors[best], self.image_size)
        return boxes[suppress(boxes, scores[best], limit=0.7)[: self.proposals]]

    def _first_losses(self, offsets: torch.Tensor, scores: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compare the anchors of one image with its boxes: near ones hold something, far ones nothing."""
        overlaps = overlap(self.anchors, real)
        nearest = overlaps.max(dim=1)
        holds = nearest.values > 0.5
        holds[overlaps.argmax(dim=0)] = True  # each box has an anchor, even if none is near
        counts = holds | (nearest.values < 0.3)
        weights = torch.where(holds, counts.sum() / holds.sum(), 1.0)[counts] / 4  # few anchors hold anything
        wanted = encode(real[nearest.indices[holds]], self.anchors[holds])
        return {
            "objectness_loss": binary_cross_entropy_with_logits(scores[counts], holds[counts].float(), weights),
            "proposal_loss": smooth_l1_loss(offsets[holds], wanted, beta=0.1),
        }

    def _second_losses(
        self, features: torch.Tensor, candidates: torch.Tensor, real: torch.Tensor, classes: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Compare what the second stage makes of candidates with the boxes and classes that they are near to."""
        offsets, logits = self._look(features, candidates)
        nearest = overlap(candidates, real).max(dim=1)
        holds = nearest.values > 0.5
        labels = torch.where(holds, classes[nearest.indices], 0)
        wanted = encode(real[nearest.indices[holds]], candidates[holds])
        return {
            "class_loss": cross_entropy(logits, labels),
            "box_loss": smooth_l1_loss(offsets[holds], wanted, beta=0.1),
        }

    def _look(self, features: torch.Tensor, boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return offsets ``(n, 4)`` and logits ``(n, 1 + classes)`` of boxes in one image."""
        steps = (torch.arange(CELLS, device=boxes.device) + 0.5) / CELLS
        x = boxes[:, 0, None] + steps * (boxes[:, 2] - boxes[:, 0])[:, None]
        y = boxes[:, 1, None] + steps * (boxes[:, 3] - boxes[:, 1])[:, None]
        shape = (len(boxes), CELLS, CELLS)
        points = torch.stack([x[:, None, :].expand(shape), y[:, :, None].expand(shape)], dim=3)
        grid = (2 * points / self.image_size - 1).view(1, -1, CELLS, 2)
        seen = grid_sample(features, grid, padding_mode="border", align_corners=False)
        seen = seen.view(features.shape[1], *shape).transpose(0, 1)
        found = self.head_outputs(self.head(seen))
        return found[:, :4], found[:, 4:]

    def _detect(self, features: torch.Tensor, candidates: torch.Tensor) -> Detection:
        offsets, logits = self._look(features, candidates)
        boxes = decode(offsets, candidates, self.image_size)
        scores, classes = logits.softmax(dim=1)[:, 1:].max(dim=1)
        # Boxes of different classes are moved apart, so that none of them suppresses another.
        apart = boxes + (2 * self.image_size * classes)[:, None]
        kept = suppress(apart, scores, limit=0.5)
        return Detection(boxes[kept], 1 + classes[kept], scores[kept])


def make_anchors(image_size: int, sizes: list[int]) -> torch.Tensor:
    """Return squares of all sizes about each place of the features, by row, column and size: ``(n, 4)``."""
    centers = (torch.arange(image_size // STRIDE) + 0.5) * STRIDE
    y, x, size = torch.meshgrid(centers, centers, torch.tensor(sizes, dtype=torch.float32), indexing="ij")
    return torch.stack([x - size / 2, y - size / 2, x + size / 2, y + size / 2], dim=3).view(-1, 4)
