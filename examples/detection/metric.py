"""The usual metric of detectors, as a custom reducer: it is a mean of nothing that a single batch knows."""

from typing import Any

import torch
from boxes import overlap
from detector import Detection

from det_lightning import pytorch


class AveragePrecision(pytorch.MetricReducer):
    """The area below precision over recall, the mean over all classes that occur; 1 is perfect.

    A detection is right if it overlaps a box of its class by more than a half and no better one took that box.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.detections: list[tuple[int, float, bool]] = []  # class, score, right
        self.expected: dict[int, int] = {}  # boxes by class

    def update(self, found: Detection, boxes: torch.Tensor, classes: torch.Tensor) -> None:
        """Add the detections of an image, best first, and its real boxes ``(n, 4)`` with their classes ``(n,)``."""
        for number in classes.tolist():
            self.expected[number] = self.expected.get(number, 0) + 1
        overlaps = overlap(found.boxes, boxes) * (found.classes[:, None] == classes[None])
        for row, number, score in zip(overlaps, found.classes.tolist(), found.scores.tolist(), strict=True):
            best = int(row.argmax())
            is_right = bool(row[best] > 0.5)
            self.detections.append((number, score, is_right))
            if is_right:
                overlaps[:, best] = 0  # taken

    def per_slot_reduce(self) -> Any:
        return self.detections, self.expected

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> float:
        detections = sorted((entry for found, _ in per_slot_metrics for entry in found), key=lambda entry: -entry[1])
        expected: dict[int, int] = {}
        for _, counts in per_slot_metrics:
            for number, count in counts.items():
                expected[number] = expected.get(number, 0) + count
        areas = [
            self._area([is_right for found, _, is_right in detections if found == number], count)
            for number, count in expected.items()
        ]
        return sum(areas) / len(areas)

    def _area(self, are_right: list[bool], expected: int) -> float:
        """Return the area for one class, whose detections are right or wrong, best first."""
        if not are_right:
            return 0.0
        right = torch.tensor(are_right, dtype=torch.float64)
        precision = right.cumsum(0) / torch.arange(1, len(right) + 1)
        # At each recall the best precision that is reached there or later.
        best = precision.flip(0).cummax(0).values.flip(0)
        return float((best * right).sum() / expected)
