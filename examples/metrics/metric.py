"""A metric that depends on all predictions at once, as a custom reducer."""

from typing import Any

import torch

from det_lightning import pytorch


class SensitivityAtSpecificity(pytorch.MetricReducer):
    """How many of the ill a test finds, if its threshold is such that it alarms few of the healthy.

    Args:
        specificity: the share of the healthy that must not be alarmed, from 0 to 1.
    """

    def __init__(self, specificity: float) -> None:
        self.specificity = specificity
        self.reset()

    def reset(self) -> None:
        self.scores: list[float] = []
        self.are_ill: list[bool] = []

    def update(self, scores: torch.Tensor, are_ill: torch.Tensor) -> None:
        """Add scores ``(n,)``, higher for the ill, and who is ill ``(n,)``."""
        self.scores += scores.tolist()
        self.are_ill += are_ill.bool().tolist()

    def per_slot_reduce(self) -> Any:
        return self.scores, self.are_ill

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> dict[str, float]:
        scores = torch.tensor([score for found, _ in per_slot_metrics for score in found])
        are_ill = torch.tensor([is_ill for _, ill in per_slot_metrics for is_ill in ill])
        healthy = scores[~are_ill].sort().values
        # The lowest threshold that enough of the healthy do not exceed.
        place = min(int(self.specificity * len(healthy)), len(healthy) - 1)
        threshold = healthy[place]
        return {"threshold": float(threshold), "sensitivity": float((scores[are_ill] > threshold).float().mean())}
