"""What a context does otherwise than in plain float32."""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Precision"]


class Precision(Protocol):
    """The way of a loss to the parameters: backward pass, exchange of gradients, step; and what is scaled on it."""

    def begin_batch(self, updates: bool) -> None:
        """Begin a training batch; ``updates`` if optimizers step on it."""

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        """Run ``loss.backward``, scaled if need be."""

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients of ``optimizer`` those of all ranks."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients of ``optimizer`` those of the loss itself, before they are looked at."""

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        """Run one step of ``optimizer``, unless scaled gradients overflowed; by ``scaler`` if the trial gave one."""

    def end_batch(self) -> None:
        """End a training batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return what belongs into ``state_dict.pth`` beside the state of ``context.scaler``, by key."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned from the content of a ``state_dict.pth``."""

    def unfinished(self) -> dict[str, Any]:
        """Return what an aggregation under way has collected beyond the gradients of the models' parameters."""

    def load_unfinished(self, saved: dict[str, Any]) -> None:
        """Take up what :meth:`unfinished` returned; empty if there was no such thing."""
