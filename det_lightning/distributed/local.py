"""Training in one process on one device, and what several processes with whole models have in common with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from det_lightning.distributed.backend import DDP_PREFIX, Backend
from det_lightning.distributed.weight_cast import WeightCast


class LocalPlacement:
    """Moves models to a device and leaves optimizers as they are.

    Args:
        device: of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.to(self.device)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        return optimizer

    def cast_weights(self, model: torch.nn.Module, casting: WeightCast) -> torch.nn.Module:
        casting.renew(model)
        return model

    def change_optimizer(
        self, optimizer: torch.optim.Optimizer, change: Callable[[torch.optim.Optimizer], None]
    ) -> None:
        change(optimizer)


class LocalGradients:
    """Runs backward passes and steps of a single process, which exchanges nothing."""

    exchanges = False

    def begin_batch(self, communicate: bool) -> None:
        """There is nobody to exchange gradients with."""

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

    def average_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The gradients are those of all ranks, for there is one."""

    def agree(self, flag: torch.Tensor) -> None:
        """A single rank agrees with itself."""


class LocalPhases:
    """Every rank has been equal since models were wrapped, and can run its models by itself."""

    def begin_training(self) -> None:
        """Nothing is left to be made equal."""

    def begin_validation(self, in_step: bool) -> None:
        """Nothing has to be exchanged."""

    def end_validation(self) -> None:
        """Nothing was begun."""


class WholeStates:
    """The states of models and optimizers of which every rank holds all."""

    is_sharded = False

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        return model.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def load_model(self, model: torch.nn.Module, weights: dict[str, Any]) -> None:
        model.load_state_dict(weights)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)

    def gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        named = model.named_parameters()
        return {name.removeprefix(DDP_PREFIX): p.grad for name, p in named if p.grad is not None}

    def load_gradients(self, model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
        for name, parameter in model.named_parameters():
            grad = saved.get(name.removeprefix(DDP_PREFIX))
            parameter.grad = None if grad is None else self.place_like(parameter, grad)

    def gather(self, tensors: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        return tensors

    def place_like(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        return whole.to(parameter.device)


class LocalBackend(Backend):
    """One process on one device.

    Args:
        device: where to train; by default the first CUDA device if there is one, else the CPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        device = device or torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        super().__init__(device, LocalPlacement(device), LocalGradients(), LocalPhases(), WholeStates())
