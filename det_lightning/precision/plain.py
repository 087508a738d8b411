"""The precision that parameters have, with nothing scaled."""

from __future__ import annotations

import logging
from typing import Any

import torch

from det_lightning.distributed.backend import Backend

__all__ = ["PlainPrecision"]

logger = logging.getLogger("det_lightning.pytorch")


class PlainPrecision:
    """Leaves everything to the backend.

    Args:
        backend: what the context trains on.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def begin_batch(self, updates: bool) -> None:
        self._backend.begin_batch(updates)

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        self._backend.backward(loss, gradient, retain_graph, create_graph)

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        self._backend.synchronize(optimizer)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing is scaled."""

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        self._backend.step(optimizer, scaler)

    def end_batch(self) -> None:
        """Nothing is adapted."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "amp_state" in state:
            logger.warning("The checkpoint has the state of apex's loss scalers, which the trial does not configure.")

    def unfinished(self) -> dict[str, Any]:
        return {}

    def load_unfinished(self, saved: dict[str, Any]) -> None:
        """There is nothing beyond gradients."""
