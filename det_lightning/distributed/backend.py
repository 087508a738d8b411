"""What trains a trial's models on the devices and processes that there are: an interface for each purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from det_lightning.distributed.weight_cast import WeightCast

#: What DistributedDataParallel puts before the names of parameters and buffers.
DDP_PREFIX = "module."


class ModelPlacement(Protocol):
    """Makes models and optimizers ready for training."""

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move ``model`` to the device and make it ready for training."""

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        """Make ``optimizer`` ready for training. ``options`` are those of ``context.wrap_optimizer``."""

    def cast_weights(self, model: torch.nn.Module, casting: WeightCast) -> torch.nn.Module:
        """Let ``casting`` change the type of a wrapped model's parameters; return what to train with from now on.

        Optimizers go on with those in float32.

        Raises:
            InvalidExperimentException: they cannot be changed, or not any more.
        """

    def change_optimizer(
        self, optimizer: torch.optim.Optimizer, change: Callable[[torch.optim.Optimizer], None]
    ) -> None:
        """Let ``change`` give an optimizer other parameters.

        Raises:
            InvalidExperimentException: its parameters cannot be changed any more.
        """


class GradientPath(Protocol):
    """The way from a loss to updated parameters."""

    @property
    def exchanges(self) -> bool:
        """Whether :meth:`begin_batch` and :meth:`synchronize` have to be called."""

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


class GradientExchange(GradientPath, Protocol):
    """A :class:`GradientPath` that is the device's own, with what scaling losses by the backward pass needs."""

    def average_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average over ranks those gradients of ``parameters``, of wrapped models, that no backward pass averages."""

    def agree(self, flag: torch.Tensor) -> None:
        """Make a scalar on the device the greatest that any rank has."""


class Phases(Protocol):
    """What has to happen between batches."""

    def begin_training(self) -> None:
        """Begin a run, when everything is wrapped and loaded."""

    def begin_validation(self, in_step: bool) -> None:
        """Begin a validation; ``in_step`` if all ranks run the models equally often in it."""

    def end_validation(self) -> None:
        """End a validation."""


class ModelStates(Protocol):
    """Reads and loads the states of wrapped models and optimizers."""

    @property
    def is_sharded(self) -> bool:
        """The ranks hold different parts of the states.

        Then all ranks have to ask for a state or gradients, together; the chief gets them, and the others an empty
        dict. Gradients are those of all ranks, averaged.
        """

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the whole state of a wrapped model."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer."""

    def load_model(self, model: torch.nn.Module, weights: dict[str, Any]) -> None:
        """Load a whole state into a wrapped model."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a whole state into an optimizer."""

    def gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the gradients that a wrapped model holds, by parameter, each in the shape of the whole parameter."""

    def load_gradients(self, model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
        """Put back what :meth:`gradients` returned, and take away all others."""

    def gather(self, tensors: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Return tensors that are as parameters are, whole."""

    def place_like(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor as ``parameter`` is: on its device, in shards if that is in shards."""


class Backend:
    """What a context trains on, as one object for each purpose.

    Args:
        device: of this process.
        placement: makes models and optimizers ready.
        gradients: runs backward passes and steps.
        phases: begins runs and validations.
        states: reads and loads the states of models and optimizers.
    """

    def __init__(
        self,
        device: torch.device,
        placement: ModelPlacement,
        gradients: GradientExchange,
        phases: Phases,
        states: ModelStates,
    ) -> None:
        self.device = device
        self.placement = placement
        self.gradients = gradients
        self.phases = phases
        self.states = states


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters that an optimizer updates, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
