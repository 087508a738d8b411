"""Horovod: a trial's optimizers become Horovod's, which all-reduce gradients."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from det_lightning import errors
from det_lightning.distributed.backend import Backend, GradientExchange, ModelPlacement, ModelStates, list_parameters
from det_lightning.distributed.processes import connect_horovod


class HorovodOptimizer:
    """A Horovod optimizer made from a torch optimizer, and corrected where the two differ.

    Attributes:
        passes: number of backward passes that add to a gradient before it is all-reduced.
    """

    def __init__(
        self,
        hvd: Any,
        optimizer: torch.optim.Optimizer,
        named: dict[str, torch.nn.Parameter],
        passes: int,
        compresses: bool,
    ) -> None:
        self._hvd = hvd
        self._named = named
        self._name = f"{next(iter(named), 'nothing')}.used"
        self.passes = passes
        self.parameters = list(named.values())
        for name, parameter in named.items():
            if parameter.dtype is torch.bfloat16 and not compresses:
                raise errors.InvalidExperimentException(
                    f"{name} is of type bfloat16, which Horovod cannot exchange. Train in float32 with "
                    "context.experimental.use_amp(), or call wrap_optimizer(..., fp16_compression=True)."
                )
        # Horovod would skip frozen parameters for good, and the ranks would diverge if these are trained later.
        frozen = [p for p in self.parameters if not p.requires_grad and p.is_floating_point()]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            self.optimizer: Any = hvd.DistributedOptimizer(
                optimizer,
                named_parameters=list(named.items()),
                backward_passes_per_step=passes,
                compression=hvd.Compression.fp16 if compresses else hvd.Compression.none,
            )
        except TypeError as e:
            raise errors.InvalidExperimentException(
                f"Horovod cannot wrap a {type(optimizer).__name__}: Horovod makes a new optimizer from the parameter "
                f"groups alone ({e}). Give the other arguments of __init__ default values."
            ) from e
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        # State, defaults and hooks would be lost. A scheduler may have replaced the step of the old optimizer.
        vars(self.optimizer).update({name: value for name, value in vars(optimizer).items() if name != "step"})
        self._replace_methods()

    def _replace_methods(self) -> None:
        """Correct methods of the class that Horovod creates for each optimizer."""
        wrapped = self.optimizer
        kind: Any = type(wrapped)
        # Hooks around a step would run twice: around Horovod's step, and around the inner step.
        step_of_horovod = getattr(kind.step, "__wrapped__", kind.step)

        def step(_: Any, closure: Any = None) -> Any:
            if closure is not None:
                raise errors.InvalidExperimentException(
                    f"{kind.__name__}.step() got a closure: no rank would get the gradients of other ranks. "
                    "Call context.backward() and context.step_optimizer()."
                )
            return step_of_horovod(wrapped)

        step.hooked = True  # type: ignore[attr-defined]
        kind.step = step
        zero_grad_of_torch = kind.__mro__[1].zero_grad

        def zero_grad(_: Any, set_to_none: bool = True) -> None:
            self.finish()
            # Passes that were counted but not exchanged no longer count.
            self._handles.clear()
            wrapped.set_backward_passes_per_step(wrapped.backward_passes_per_step)
            zero_grad_of_torch(wrapped, set_to_none)

        kind.zero_grad = zero_grad
        # Lightning's optimizers derive from this class. Horovod's methods call super() of the class of self, so they
        # would call themselves endlessly, and set their flags on the wrong object.
        for name in ("load_state_dict", "synchronize", "skip_synchronize"):
            setattr(kind, name, getattr(wrapped, name))  # already bound to this object

    def is_exchanging(self) -> bool:
        """Return whether any gradient is being all-reduced."""
        return any(handle is not None for handle, _ in self._handles.values())

    @property
    def _handles(self) -> Any:
        """The all-reduces under way, by parameter, for which Horovod has no public name."""
        return self.optimizer._handles

    def describe_passes(self) -> str:
        """Return the optimizer's class, first parameters, and allowed number of backward passes."""
        names = ", ".join(list(self._named)[:3]) + (", ..." if len(self._named) > 3 else "")
        # Horovod's class has the name of the original class.
        return f"{type(self.optimizer).__name__} of {names}, with backward_passes_per_step={self.passes}"

    def finish(self) -> None:
        if self.is_exchanging():
            self.synchronize()

    def synchronize(self) -> None:
        """Average all gradients; remove those of parameters that no rank has used.

        Horovod fills in zeros, with which weight decay and momentum would still act.
        """
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != len(self.parameters):
            raise errors.InvalidExperimentException(
                f"The {type(self.optimizer).__name__} got parameters after wrap_optimizer(), unknown to Horovod. Add "
                "all parameters before wrap_optimizer(); freeze parameters that train later."
            )
        if self._hvd.size() == 1:
            return
        here = torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=torch.int32)
        anywhere = self._hvd.allreduce_async(here, name=self._name, op=self._hvd.Sum)
        self.optimizer.synchronize()
        for parameter, ranks in zip(self.parameters, self._hvd.synchronize(anywhere).tolist(), strict=True):
            if ranks == 0:
                parameter.grad = None


# More backward passes than ever, so that no pass exchanges gradients.
_NEVER = sys.maxsize
# Part of Horovod's message about too many passes.
_TOO_MANY_PASSES = "backward_passes_per_step"


class HorovodPlacement(ModelPlacement):
    """Turns each wrapped optimizer into a Horovod optimizer."""

    def __init__(self, device: torch.device, hvd: Any) -> None:
        super().__init__(device)
        self.hvd = hvd
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[HorovodOptimizer] = []

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        model = super().wrap_model(model)
        self.models.append(model)
        return model

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        wrapped = HorovodOptimizer(
            self.hvd,
            optimizer,
            self._name_parameters(optimizer),
            passes=options.get("backward_passes_per_step", 1),
            compresses=bool(options.get("fp16_compression")),
        )
        self.optimizers.append(wrapped)
        found: torch.optim.Optimizer = wrapped.optimizer
        return found

    def _name_parameters(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
        """Name parameters in the same way on all ranks, by model if possible."""
        taken = {parameter for wrapped in self.optimizers for parameter in wrapped.parameters}
        of_models = {
            parameter: f"model{index}.{name}"
            for index, model in enumerate(self.models)
            for name, parameter in model.named_parameters()
        }
        named = {}
        for number, parameter in enumerate(list_parameters(optimizer)):
            named[of_models.get(parameter, f"optimizer{len(self.optimizers)}.{number}")] = parameter
        if twice := [name for name, parameter in named.items() if parameter in taken]:
            raise errors.InvalidExperimentException(
                f"{twice[0]} belongs to two wrapped optimizers, and Horovod cannot train both; leave all updates of "
                "the parameter to one optimizer."
            )
        return named

    def replace_parameters(
        self, optimizer: torch.optim.Optimizer, others: dict[torch.nn.Parameter, torch.nn.Parameter]
    ) -> None:
        """Raise an error: Horovod all-reduces only the gradients of the original parameters."""
        raise errors.InvalidExperimentException(
            f"Horovod knows the parameters of the {type(optimizer).__name__} since wrap_optimizer(), and would not "
            "exchange the gradients of new parameters. Use opt_level='O2', which keeps the parameters as masters, or "
            "master_weights=True."
        )

    def begin_training(self) -> None:
        """Give all ranks the chief's weights and optimizer states."""
        if self.hvd.size() == 1:
            return
        of_models = [tensor for model in self.models for tensor in (*model.parameters(), *model.buffers())]
        of_optimizers = [parameter for wrapped in self.optimizers for parameter in wrapped.parameters]
        _share_tensors(self.hvd, list(dict.fromkeys([*of_models, *of_optimizers])), "det_lightning.weights")
        for index, wrapped in enumerate(self.optimizers):
            _share_state(self.hvd, wrapped.optimizer, self.device, f"det_lightning.optimizer{index}")


class HorovodGradients(GradientExchange):
    """Finishes the all-reduce that Horovod's optimizers begin during a backward pass."""

    exchanges = True

    def __init__(self, placed: HorovodPlacement) -> None:
        self._placed = placed
        self._communicates = True

    def begin_batch(self, communicate: bool) -> None:
        if communicate == self._communicates:
            return
        self._communicates = communicate
        for wrapped in self._placed.optimizers:
            wrapped.finish()
            wrapped.optimizer.set_backward_passes_per_step(wrapped.passes if communicate else _NEVER)

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        """Run ``loss.backward``; raise an InvalidExperimentException if the gradients are already being all-reduced."""
        try:
            super().backward(loss, gradient, retain_graph, create_graph)
        except AssertionError as e:
            if _TOO_MANY_PASSES not in str(e):
                raise
            found = [wrapped.describe_passes() for wrapped in self._placed.optimizers if wrapped.is_exchanging()]
            raise errors.InvalidExperimentException(
                f"context.backward() came to parameters whose gradients Horovod exchanges already: {'; '.join(found)}. "
                "To add up the gradients of N backward passes before each step, call "
                "context.wrap_optimizer(optimizer, backward_passes_per_step=N). To drop the gradients of another loss, "
                "for example of a GAN's generator in the critic, call optimizer.zero_grad() first, or freeze the "
                "parameters in the other pass with model.requires_grad_(False)."
            ) from e

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        self._wrapped(optimizer).synchronize()

    def agree(self, flag: torch.Tensor) -> None:
        if self._placed.hvd.size() > 1:
            flag.copy_(self._placed.hvd.allreduce(flag, name="det_lightning.agree", op=self._placed.hvd.Sum))

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        with self._wrapped(optimizer).optimizer.skip_synchronize():
            super().step(optimizer, scaler)

    def _wrapped(self, optimizer: torch.optim.Optimizer) -> HorovodOptimizer:
        return next(wrapped for wrapped in self._placed.optimizers if wrapped.optimizer is optimizer)


class HorovodStates(ModelStates):
    """The states of models and optimizers on every rank; gradients are read while no all-reduce is running."""

    def __init__(self, placed: HorovodPlacement) -> None:
        self._placed = placed

    def gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        for wrapped in self._placed.optimizers:
            wrapped.finish()
        return super().gradients(model)


class HorovodBackend(Backend):
    """Trains with Horovod's ``DistributedOptimizer``, which averages gradients while a backward pass runs.

    A parameter may get gradients from ``backward_passes_per_step`` backward passes before each step; more are an error.
    """

    def __init__(self, device: torch.device) -> None:
        hvd = connect_horovod()
        if device.type == "cuda" and not (hvd.cuda_built() or hvd.rocm_built()):
            raise ValueError(
                f"This run trains with Horovod on {device}, but Horovod was built for the CPU. Run "
                "HOROVOD_GPU_OPERATIONS=NCCL scripts/build_horovod.sh where CUDA and NCCL are installed."
            )
        placed = HorovodPlacement(device, hvd)
        super().__init__(device, placed, HorovodGradients(placed), HorovodStates(placed))


@dataclasses.dataclass(frozen=True)
class _Outline:
    """Shape, type and device of a tensor, without values."""

    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Outline:
        return cls(tensor.shape, tensor.dtype, tensor.is_cpu)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_cpu else device)


def _share_tensors(hvd: Any, tensors: list[torch.Tensor], name: str) -> None:
    """Overwrite tensors of any shape and type, in the same order on all ranks, with the chief's."""
    under_way = []
    for number, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        whole = tensor.detach().contiguous()
        # As bytes, because Horovod knows fewer types than torch.
        flat = whole.reshape(-1).view(torch.uint8)
        under_way.append((hvd.broadcast_async_(flat, 0, name=f"{name}.{number}"), tensor.detach(), whole))
    for handle, tensor, whole in under_way:
        hvd.synchronize(handle)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)


def _share_state(hvd: Any, optimizer: torch.optim.Optimizer, device: torch.device, name: str) -> None:
    """Give an optimizer the chief's state and options.

    Horovod's function creates a missing state by a step with zero gradients, in which weight decay changes the weights.
    Here a new optimizer stays new.
    """
    state = optimizer.state_dict()
    outlined = tree_map_only(torch.Tensor, _Outline.of, state["state"])
    chiefs: dict[str, Any] = hvd.broadcast_object({**state, "state": outlined}, 0, name=f"{name}.outline")
    if hvd.rank() != 0:
        state = {**chiefs, "state": tree_map_only(_Outline, lambda found: found.empty(device), chiefs["state"])}
    _share_tensors(hvd, [leaf for leaf in tree_leaves(state["state"]) if isinstance(leaf, torch.Tensor)], name)
    if hvd.rank() != 0:
        optimizer.load_state_dict(state)
