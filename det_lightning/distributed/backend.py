"""What a trial's context needs from the system that it trains on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

__all__ = ["DDP_PREFIX", "Backend", "LocalBackend", "WeightCasting", "WholeStates", "parameters_of"]

#: What DistributedDataParallel puts before the names of parameters and buffers.
DDP_PREFIX = "module."


class WeightCasting(Protocol):
    """Gives models parameters in half precision, and knows which in float32 they took the place of."""

    def keeps(self, module: torch.nn.Module) -> bool:
        """Tell whether a module's own parameters and buffers stay as they are."""

    def renew(self, model: torch.nn.Module) -> None:
        """Give ``model`` new parameters; the former live on."""

    def convert(self, model: torch.nn.Module) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
        """Cast the parameters of ``model`` in place; return the new float32 one that takes up the value of each."""


class Backend(Protocol):
    """Placing models, and running backward and optimizer steps, on whatever devices and processes there are."""

    @property
    def device(self) -> torch.device:
        """The device of this process."""

    @property
    def is_sharded(self) -> bool:
        """The ranks hold different parts of the states.

        Then all ranks have to ask for a state or gradients, together; the chief gets them, and the others an empty
        dict. Gradients are those of all ranks, averaged.
        """

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Place ``model`` on the device and make it ready for training."""

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        """Make ``optimizer`` ready for training. ``options`` are those of ``context.wrap_optimizer``."""

    def begin_training(self) -> None:
        """Begin a run, when everything is wrapped and loaded."""

    def begin_batch(self, communicate: bool) -> None:
        """Begin a training batch; its gradients are exchanged over ranks only if ``communicate`` is true."""

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        """Run ``loss.backward``."""

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients of ``optimizer`` those of all ranks, before they are looked at."""

    def average_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average over ranks those gradients of ``parameters``, of wrapped models, that no backward pass averages."""

    def agree(self, flag: torch.Tensor) -> None:
        """Make a scalar on the device the greatest that any rank has."""

    def cast_weights(self, model: torch.nn.Module, casting: WeightCasting) -> torch.nn.Module:
        """Let ``casting`` change the type of a wrapped model's parameters; return what to train with from now on.

        Optimizers go on with those in float32.

        Raises:
            InvalidExperimentException: they can not be changed, or not any more.
        """

    def change_optimizer(
        self, optimizer: torch.optim.Optimizer, change: Callable[[torch.optim.Optimizer], None]
    ) -> None:
        """Let ``change`` give an optimizer other parameters.

        Raises:
            InvalidExperimentException: its parameters can not be changed any more.
        """

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        """Run one step of ``optimizer``, through ``scaler`` if there is one."""

    def begin_validation(self, in_step: bool) -> None:
        """Begin a validation; ``in_step`` if all ranks run the models equally often in it."""

    def end_validation(self) -> None:
        """End a validation."""

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the whole state of a wrapped model."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer."""

    def load_model(self, model: torch.nn.Module, weights: dict[str, Any]) -> None:
        """Load a whole state into a wrapped model."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a whole state into an optimizer."""

    def gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the gradients that a wrapped model holds, by parameter."""

    def load_gradients(self, model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
        """Put back what :meth:`gradients` returned, and take away all others."""

    def gather(self, tensors: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Return tensors that are as parameters are, whole."""

    def place_like(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor as ``parameter`` is: on its device, in shards if that is in shards."""


class WholeStates:
    """The part of a :class:`Backend` where every rank holds all of each model and optimizer."""

    is_sharded = False

    def begin_training(self) -> None:
        """The ranks are equal since models were wrapped."""

    def begin_validation(self, in_step: bool) -> None:
        """Every rank can run its models by itself."""

    def end_validation(self) -> None:
        """Nothing was begun."""

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        return model.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def load_model(self, model: torch.nn.Module, weights: dict[str, Any]) -> None:
        model.load_state_dict(weights)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)

    def change_optimizer(
        self, optimizer: torch.optim.Optimizer, change: Callable[[torch.optim.Optimizer], None]
    ) -> None:
        change(optimizer)

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


class LocalBackend(WholeStates):
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

    def average_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The gradients are those of all ranks, for there is one."""

    def agree(self, flag: torch.Tensor) -> None:
        """A single rank agrees with itself."""

    def cast_weights(self, model: torch.nn.Module, casting: WeightCasting) -> torch.nn.Module:
        casting.renew(model)
        return model

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters that an optimizer updates, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
