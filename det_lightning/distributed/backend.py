"""The backends that train a trial's models: the base and one device here, several processes in sibling modules."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from det_lightning.distributed.weight_cast import WeightCast, replace_parameters

#: The prefix that DistributedDataParallel adds to the names of parameters and buffers.
DDP_PREFIX = "module."


class ModelPlacement:
    """Prepares models and optimizers for training and validation; this base class moves models to a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move ``model`` to the device and prepare it for training."""
        return model.to(self.device)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        """Prepare ``optimizer`` for training. ``options`` are those of ``context.wrap_optimizer``."""
        return optimizer

    def cast_weights(self, model: torch.nn.Module, casting: WeightCast) -> torch.nn.Module:
        """Let ``casting`` change the type of a wrapped model's parameters; return the model to train from now on.

        Optimizers keep the float32 parameters.
        """
        casting.renew(model)
        return model

    def replace_parameters(
        self, optimizer: torch.optim.Optimizer, others: dict[torch.nn.Parameter, torch.nn.Parameter]
    ) -> None:
        """Make an optimizer update ``others`` in place of its own parameters."""
        replace_parameters(optimizer, others)

    def begin_training(self) -> None:
        """Begin a run, once everything is wrapped and loaded."""

    def begin_validation(self, in_step: bool) -> None:
        """Begin a validation; ``in_step`` if all ranks run the models equally often in it."""

    def end_validation(self) -> None:
        """End a validation."""


class GradientExchange:
    """Exchanges gradients among ranks; this base class is for a single process, with nothing to exchange.

    :meth:`begin_batch` and :meth:`synchronize` need to be called only if it ``exchanges``.
    """

    exchanges = False

    def begin_batch(self, communicate: bool) -> None:
        """Begin a training batch; its gradients are exchanged over ranks only if ``communicate`` is true."""

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        """Run ``loss.backward``. A ``loss`` has the shape ``()``, or that of ``gradient``."""
        loss.backward(gradient, retain_graph, create_graph)  # type: ignore[no-untyped-call]

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange the gradients of ``optimizer`` over all ranks, before anything looks at them."""

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        """Run one step of ``optimizer``, through ``scaler`` if there is one."""
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)

    def average_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average over ranks the gradients of wrapped models' ``parameters`` that no backward pass averages."""

    def agree(self, flag: torch.Tensor) -> None:
        """Set a scalar on the device, of shape ``()``, so that it is nonzero everywhere if it is on any rank."""


class ModelStates:
    """Reads and loads the whole states of wrapped models and of optimizers; in this base class every rank holds them.

    If ``is_sharded`` is true, the ranks hold different parts. Then all ranks must ask for a state or gradients
    together; the chief gets them whole, and the others an empty dict. Gradients are averaged over the ranks.
    """

    is_sharded = False
    #: Whether checkpoints are sharded: each rank writes what it holds.
    writes_shards = False

    @contextlib.contextmanager
    def in_shards(self) -> Iterator[None]:
        """If it ``writes_shards``, gather nothing inside the block: every rank gets sharded tensors as they are."""
        yield

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the whole state of a wrapped model."""
        return model.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer."""
        return optimizer.state_dict()

    def load_model(self, model: torch.nn.Module, weights: dict[str, Any]) -> None:
        """Load a whole state into a wrapped model."""
        model.load_state_dict(weights)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a whole state into an optimizer."""
        optimizer.load_state_dict(state)

    def gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the gradients that a wrapped model holds, by parameter, each in the shape of the whole parameter."""
        prefix = DDP_PREFIX if isinstance(model, DistributedDataParallel) else ""
        return {name.removeprefix(prefix): p.grad for name, p in model.named_parameters() if p.grad is not None}

    def load_gradients(self, model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
        """Restore what :meth:`gradients` returned, and remove all other gradients."""
        is_ddp = isinstance(model, DistributedDataParallel)
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            without = name.removeprefix(DDP_PREFIX)
            # In older checkpoints the prefix is missing for any model.
            is_older = name not in saved and without not in parameters
            grad = saved.get(without if is_ddp or is_older else name)
            parameter.grad = None if grad is None else self.place_like(parameter, grad)

    def gather(self, tensors: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Return the tensors, with whole ones in place of those that are sharded like parameters."""
        return tensors

    def place_like(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor on the device of ``parameter``, sharded like it; both have the same whole shape."""
        return whole.to(parameter.device)


@dataclasses.dataclass(eq=False)
class Backend:
    """What a context trains through: the device of this process, and one object for each purpose."""

    device: torch.device
    placement: ModelPlacement
    gradients: GradientExchange
    states: ModelStates


class LocalBackend(Backend):
    """One process on one device: by default the first CUDA device if there is one, else the CPU."""

    def __init__(self, device: torch.device | None = None) -> None:
        device = device or torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        super().__init__(device, ModelPlacement(device), GradientExchange(), ModelStates())


def exchange_flat(tensors: Iterable[torch.Tensor], exchange: Callable[[torch.Tensor], Any]) -> None:
    """Run ``exchange`` in place on all values of ``tensors``, as one flat tensor per type."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for same in by_type.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        exchange(flat)
        for tensor, values in zip(same, torch.split(flat, [t.numel() for t in same]), strict=True):
            tensor.copy_(values.view_as(tensor))


def watch_gradient(parameter: torch.nn.Parameter, hook: Callable[[torch.nn.Parameter], None]) -> None:
    """Call ``hook`` when the gradient of ``parameter``, which may be frozen for now, has changed."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(not frozen)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters that an optimizer updates, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
