"""Boxes as ``(n, 4)`` tensors of their corners in pixels: left, top, right, bottom."""

import torch

LARGEST_GROWTH = 4.0  # the logarithm of how many times larger than its anchor a box may be


def area(boxes: torch.Tensor) -> torch.Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(dim=1)


def overlap(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return intersection over union of each box of the first ``(n, 4)`` with each of the second ``(m, 4)``."""
    top_left = torch.maximum(first[:, None, :2], second[None, :, :2])
    bottom_right = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = (bottom_right - top_left).clamp(min=0).prod(dim=2)
    return shared / (area(first)[:, None] + area(second)[None] - shared).clamp(min=1e-6)


def encode(boxes: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Return where boxes lie relative to anchors: the centre's shift in sizes of the anchor, the log of the growth."""
    size = (boxes[:, 2:] - boxes[:, :2]).clamp(min=1)
    anchor_size = anchors[:, 2:] - anchors[:, :2]
    shift = (boxes[:, :2] + boxes[:, 2:] - anchors[:, :2] - anchors[:, 2:]) / 2 / anchor_size
    return torch.cat([shift, (size / anchor_size).log()], dim=1)


def decode(offsets: torch.Tensor, anchors: torch.Tensor, image_size: int) -> torch.Tensor:
    """Return the boxes that ``encode`` gave these offsets, cut to the image."""
    anchor_size = anchors[:, 2:] - anchors[:, :2]
    center = (anchors[:, :2] + anchors[:, 2:]) / 2 + offsets[:, :2] * anchor_size
    half = anchor_size * offsets[:, 2:].clamp(max=LARGEST_GROWTH).exp() / 2
    return torch.cat([center - half, center + half], dim=1).clamp(0, image_size)


def suppress(boxes: torch.Tensor, scores: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the indices of the boxes to keep, best first: none that overlaps a better one by more than the limit."""
    order = scores.argsort(descending=True)
    covers = (overlap(boxes[order], boxes[order]) > limit).cpu()
    kept = torch.ones(len(order), dtype=torch.bool)
    for place in range(len(order)):
        if kept[place]:
            kept[place + 1 :] &= ~covers[place, place + 1 :]
    return order[kept.to(order.device)]
