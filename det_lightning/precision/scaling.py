"""Loss scaling, between a context and the exchange of gradients."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from det_lightning.distributed.backend import GradientPath


class LossScaling:
    """A way from a loss to updated parameters on which losses are scaled; what is not overridden goes to ``path``.

    Attributes:
        exchanges: whether :meth:`begin_batch` and :meth:`synchronize` must be called.
    """

    def __init__(self, path: GradientPath) -> None:
        self._path = path
        self.exchanges = path.exchanges

    def begin_batch(self, communicate: bool) -> None:
        """Begin a training batch; ``communicate`` if optimizers step on it."""
        self._path.begin_batch(communicate)

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        """Run ``loss.backward``, scaled."""
        self._path.backward(loss, gradient, retain_graph, create_graph)

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients of ``optimizer`` those of all ranks."""
        self._path.synchronize(optimizer)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients of ``optimizer`` those of the loss itself, before they are looked at."""

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        """Run one step of ``optimizer``, unless scaled gradients overflowed; by ``scaler`` if the trial gave one."""
        self._path.step(optimizer, scaler)

    def end_batch(self) -> None:
        """End a training batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return what belongs into ``state_dict.pth`` beside the state of ``context.scaler``, by key."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned from the content of a ``state_dict.pth``."""

    def unfinished(self) -> dict[str, Any]:
        """Return what an aggregation under way has collected beyond the gradients of the models' parameters."""
        return {}

    def load_unfinished(self, saved: dict[str, Any]) -> None:
        """Load what :meth:`unfinished` returned; empty if there was no such thing."""


class LossNumbers:
    """Numbers the losses of a batch in the order of their first backward passes."""

    def __init__(self) -> None:
        self._losses: list[weakref.ref[torch.Tensor]] = []

    def clear(self) -> None:
        """Begin a batch."""
        self._losses.clear()

    def number_of(self, loss: torch.Tensor) -> int:
        """Return the number of a loss, which may run backward more than once."""
        for number, seen in enumerate(self._losses):
            if seen() is loss:
                return number
        self._losses.append(weakref.ref(loss))
        return len(self._losses) - 1
