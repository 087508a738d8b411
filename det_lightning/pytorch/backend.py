"""What a trial's context needs from the system that it trains on."""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Backend", "LocalBackend"]


class Backend(Protocol):
    """Placing models, and running backward and optimizer steps, on whatever devices and processes there are."""

    @property
    def device(self) -> torch.device:
        """The device of this process."""

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Place ``model`` on the device and make it ready for training."""

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        """Make ``optimizer`` ready for training. ``options`` are those of ``context.wrap_optimizer``."""

    def begin_batch(self, communicate: bool) -> None:
        """Begin a training batch; its gradients are exchanged over ranks only if ``communicate`` is true."""

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        """Run ``loss.backward``."""

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients of ``optimizer`` those of all ranks, before they are looked at."""

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        """Run one step of ``optimizer``, through ``scaler`` if there is one."""


class LocalBackend:
    """One process on one device.

    Args:
        device: where to train; by default the first CUDA device if there is one, else the CPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.to(self.device)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        return optimizer

    def begin_batch(self, communicate: bool) -> None:
        """A single process has nobody to exchange gradients with."""

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        loss.backward(gradient, retain_graph, create_graph)  # type: ignore[no-untyped-call]

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients are those of all ranks, for there is one."""

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
