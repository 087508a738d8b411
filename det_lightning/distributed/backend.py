"""Chooses the device of a process, and says what a backend does with models, gradients and states.

Change here: a kind of device is chosen in ``choose_device``. Other places compare its type with ``"cuda"``: process
groups in ``det_lightning/distributed/processes.py``, DDP in ``det_lightning/distributed/ddp.py``, flags of
``pl.Trainer`` in ``det_lightning/pytorch/_trainer.py``, the random state in ``det_lightning/pytorch/_random_state.py``
and half precision in ``det_lightning/precision/choice.py``. ``det_lightning/launch/command_line.py`` and
``det_lightning/experiments/local.py`` count GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel


class WeightCast:
    """Casts the weights of models to ``dtype``, each parameter once, and remembers both versions.

    Attributes:
        halves: for each float32 parameter, the cast parameter of the models.
    """

    def __init__(self, dtype: torch.dtype, keep_batchnorm: bool) -> None:
        self.dtype = dtype
        self._keep_batchnorm = keep_batchnorm
        self.halves: dict[torch.nn.Parameter, torch.nn.Parameter] = {}

    def keeps(self, module: torch.nn.Module) -> bool:
        """Return whether a module's direct parameters and buffers keep their type."""
        return self._keep_batchnorm and isinstance(module, _BatchNorm)

    def renew(self, model: torch.nn.Module) -> None:
        """Give ``model`` new parameters; an optimizer may still hold the old ones."""
        for module in model.modules():
            if self.keeps(module):
                continue
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if self._casts(parameter):
                    setattr(module, name, self._make_half(parameter))
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(self.dtype))

    def _casts(self, parameter: torch.nn.Parameter) -> bool:
        return parameter.is_floating_point() and parameter.dtype is not self.dtype

    def _make_half(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if parameter not in self.halves:
            self.halves[parameter] = torch.nn.Parameter(parameter.detach().to(self.dtype), parameter.requires_grad)
        return self.halves[parameter]

    def convert(self, model: torch.nn.Module) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
        """Cast the parameters of ``model`` in place; return for each a float32 parameter with its old value."""
        kept = {
            module: {name: tensor.detach().clone() for name, tensor in named_tensors(module)}
            for module in model.modules()
            if self.keeps(module)
        }
        values = {
            p: torch.nn.Parameter(p.detach().clone(), p.requires_grad) for p in model.parameters() if self._casts(p)
        }
        model.to(self.dtype)
        for module, tensors in kept.items():
            _restore(module, tensors)
        former = {parameter: value for parameter, value in values.items() if parameter.dtype is self.dtype}
        self.halves.update({value: parameter for parameter, value in former.items()})
        return former


def _restore(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for dtype in {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}:
        module.to(dtype)
    with torch.no_grad():
        for name, tensor in named_tensors(module):
            tensor.copy_(tensors[name])


def replace_parameters(optimizer: torch.optim.Optimizer, others: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
    """Make ``optimizer`` update ``others`` in place of its parameters, and cast its state likewise."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            group["params"][index] = new = others.get(parameter, parameter)
            if new is not parameter and parameter in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(parameter)
    # An optimizer casts a loaded state to the types of the parameters.
    optimizer.load_state_dict(optimizer.state_dict())


def named_tensors(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of all parameters and buffers; a shared tensor appears under each name."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


#: The prefix that DistributedDataParallel adds to the names of parameters and buffers.
DDP_PREFIX = "module."


class ModelPlacement:
    """Prepares models and optimizers for training and validation; this base class moves models to a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move ``model`` to the device and prepare the model for training."""
        return model.to(self.device)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        """Prepare ``optimizer`` for training. For ``options`` see ``context.wrap_optimizer``."""
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
        """Make an optimizer update ``others`` in place of the present parameters."""
        replace_parameters(optimizer, others)

    def begin_training(self) -> None:
        """Begin a run, once everything is wrapped and loaded."""

    def begin_validation(self, in_step: bool) -> None:
        """Begin a validation; ``in_step`` if all ranks run the models equally often."""

    def end_validation(self) -> None:
        """End a validation."""


class GradientExchange:
    """All-reduces gradients; in this base class, for a single process, there is nothing to do.

    :meth:`begin_batch` and :meth:`synchronize` need to be called only if ``exchanges`` is true.
    """

    exchanges = False

    def begin_batch(self, communicate: bool) -> None:
        """Begin a training batch; its gradients are all-reduced only if ``communicate`` is true."""

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        """Run ``loss.backward``. A ``loss`` has the shape ``()``, or that of ``gradient``."""
        loss.backward(gradient, retain_graph, create_graph)  # type: ignore[no-untyped-call]

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """All-reduce the gradients of ``optimizer`` before they are used."""

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        """Run a step of ``optimizer``, through ``scaler`` unless None."""
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)

    def average_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """All-reduce the gradients of wrapped models' ``parameters`` that no backward pass all-reduces."""

    def agree(self, flag: torch.Tensor) -> None:
        """Make ``flag``, of shape ``()`` on the device, nonzero on all ranks if it is on any."""


class ModelStates:
    """Reads and loads whole states of wrapped models and of optimizers; in this base class every rank holds all states.

    If ``is_sharded`` is true, the ranks hold different parts. Then all ranks must ask for a state or gradients
    together; the chief gets the whole, other ranks an empty dict. Gradients are averaged over the ranks.
    """

    is_sharded = False
    #: Whether checkpoints are sharded: each rank writes its part.
    writes_shards = False

    @contextlib.contextmanager
    def in_shards(self) -> Iterator[None]:
        """Gather nothing inside the block if ``writes_shards``: every rank gets sharded tensors."""
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
        """Return the gradients of a wrapped model by parameter, in the shapes of whole parameters."""
        prefix = DDP_PREFIX if isinstance(model, DistributedDataParallel) else ""
        return {name.removeprefix(prefix): p.grad for name, p in model.named_parameters() if p.grad is not None}

    def load_gradients(self, model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
        """Restore gradients from :meth:`gradients`, and remove all other gradients."""
        is_ddp = isinstance(model, DistributedDataParallel)
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            without = name.removeprefix(DDP_PREFIX)
            # In older checkpoints the prefix is missing for any model.
            is_older = name not in saved and without not in parameters
            grad = saved.get(without if is_ddp or is_older else name)
            parameter.grad = None if grad is None else self.place_like(parameter, grad)

    def gather(self, tensors: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Return the tensors, gathered if sharded like parameters."""
        return tensors

    def place_like(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """Return ``whole`` on the device of ``parameter``, and sharded likewise; both have the same whole shape."""
        return whole.to(parameter.device)


@dataclasses.dataclass(eq=False)
class Backend:
    """The device of this process, and the objects that place models, exchange gradients and read states."""

    device: torch.device
    placement: ModelPlacement
    gradients: GradientExchange
    states: ModelStates


class LocalBackend(Backend):
    """A single process on a device, by default the first GPU, else the CPU."""

    def __init__(self, device: torch.device | None = None) -> None:
        device = device or choose_device()
        super().__init__(device, ModelPlacement(device), GradientExchange(), ModelStates())


def choose_device(local_rank: int = 0) -> torch.device:
    """Return the device of a process: a GPU, or the CPU without GPUs; raise a ValueError if there are too few GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return torch.device("cpu")
    if local_rank >= count:
        raise ValueError(
            f"There are more processes on this node than its {count} GPUs: no GPU for local rank {local_rank}. Start "
            f"at most {count} here (--nproc-per-node), or hide the GPUs with CUDA_VISIBLE_DEVICES=''."
        )
    return torch.device("cuda", local_rank)


def exchange_flat(tensors: Iterable[torch.Tensor], exchange: Callable[[torch.Tensor], Any]) -> None:
    """Run ``exchange`` in place on all values of ``tensors``, as a flat tensor per type."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for same in by_type.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        exchange(flat)
        for tensor, values in zip(same, torch.split(flat, [t.numel() for t in same]), strict=True):
            tensor.copy_(values.view_as(tensor))


def watch_gradient(parameter: torch.nn.Parameter, hook: Callable[[torch.nn.Parameter], None]) -> None:
    """Call ``hook`` after each change of the gradient of ``parameter``; the parameter may be frozen for now."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(not frozen)


def list_parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
