"""FSDP2: a trial's models are sharded over the ranks, and gradients reduced."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from det_lightning import errors
from det_lightning.distributed.backend import (
    Backend,
    GradientExchange,
    ModelPlacement,
    ModelStates,
    WeightCast,
    exchange_flat,
    list_parameters,
    replace_parameters,
    watch_gradient,
)
from det_lightning.distributed.sharded_states import (
    gather_optimizer,
    gather_tensors,
    load_into_optimizer,
    shard_if_alike,
    shard_like,
)

#: The modules of a model to shard as separate units: instances of the classes, or chosen by the function.
Policy = Iterable[type[torch.nn.Module]] | Callable[[torch.nn.Module], bool]


class ShardedPlacement(ModelPlacement):
    """Shards each wrapped model with ``fully_shard``, in place.

    The parameters of a unit are whole only while the unit runs; by default a model is a single unit. All ranks must run
    the same units in the same order.
    """

    def __init__(self, device: torch.device, policy: Policy | None, mixed_precision: MixedPrecisionPolicy) -> None:
        super().__init__(device)
        self._mixed_precision = mixed_precision
        units = () if callable(policy) else tuple(policy or ())
        self._is_unit = policy if callable(policy) else lambda module: isinstance(module, units)
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.whole = WholeParameters()
        # The original parameters of sharded models, by id, while anything else still refers to the parameter.
        self._replaced: weakref.WeakValueDictionary[int, torch.nn.Parameter] = weakref.WeakValueDictionary()

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard ``model``, with the chief's weights."""
        for parameter in model.parameters():
            if isinstance(parameter, DTensor) or self._replaced.get(id(parameter)) is parameter:
                raise errors.InvalidExperimentException(
                    f"wrap_model() got a {type(model).__name__} with parameters of an already sharded model. "
                    "Sharded models cannot share parameters: wrap one module that holds both models."
                )
            self._replaced[id(parameter)] = parameter
        model = model.to(self.device)
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self.models.append(model)
        if not any(True for _ in model.parameters()):
            return model  # there is nothing to shard
        units = [module for module in model.modules() if module is not model and self._is_unit(module)]
        for module in (*reversed(units), model):  # the inner ones first
            # Between passes the trial always sees the same, sharded parameters of a model.
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True, mp_policy=self._mixed_precision)
        cast(FSDPModule, model).set_reduce_scatter_unused_params(True)
        self.whole.add(model)
        clear_first(model, lambda: self.whole.clear(model.parameters()))
        return model

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
        parameters = list_parameters(optimizer)
        sharded = {parameter for model in self.models for parameter in model.parameters()}
        strange = [tuple(parameter.shape) for parameter in parameters if parameter not in sharded]
        if strange:
            raise errors.InvalidExperimentException(
                f"{len(strange)} of {len(parameters)} parameters of the {type(optimizer).__name__} belong to no "
                f"wrapped model (the first has the shape {strange[0]}). Sharding gives a model new parameters: call "
                "wrap_model() first, and build the optimizer from the parameters of the wrapped model."
            )
        clear_first(optimizer, lambda: self.whole.clear(list_parameters(optimizer)))
        self.optimizers.append(optimizer)
        return optimizer

    def cast_weights(self, model: torch.nn.Module, casting: WeightCast) -> torch.nn.Module:
        """Cast the shards of ``model``, and give the optimizers new float32 shards."""
        joint = [type(m).__name__ for m in model.modules() if casting.keeps(m) and not isinstance(m, FSDPModule)]
        if joint:
            kinds = ", ".join(sorted(set(joint)))
            raise errors.InvalidExperimentException(
                f"{len(joint)} modules of a {type(model).__name__} must stay in float32 ({kinds}), but share units of "
                "FSDP2 with parameters to cast. Make separate units with "
                f"strategy=PerModelFSDPStrategy(policy=[{kinds}]), or use keep_batchnorm_fp32=False, or opt_level='O1'."
            )
        if not self.whole.can_be_cast(model):
            raise errors.InvalidExperimentException(
                f"A {type(model).__name__} ran before the weights were cast, and FSDP2 keeps the first type. "
                "Call configure_apex_amp() right after wrap_model() and wrap_optimizer()."
            )
        former = casting.convert(model)
        self.whole.find()
        self.whole.add_replacements(former)
        for optimizer in self.optimizers:
            replace_parameters(optimizer, former)
        return model

    def replace_parameters(
        self, optimizer: torch.optim.Optimizer, others: dict[torch.nn.Parameter, torch.nn.Parameter]
    ) -> None:
        before = list_parameters(optimizer)
        super().replace_parameters(optimizer, others)
        held = {parameter for wrapped in self.optimizers for parameter in list_parameters(wrapped)}
        self.whole.forget(parameter for parameter in before if parameter not in held)

    def begin_training(self) -> None:
        """Find the whole parameters; the ranks have been equal since the models were wrapped."""
        self.whole.find()

    def begin_validation(self, in_step: bool) -> None:
        """Share the buffers; make the models whole unless all ranks run the models equally often."""
        self.whole.find()
        share_buffers(self.models)
        if not in_step:
            self._set_whole(True)

    def end_validation(self) -> None:
        self._set_whole(False)

    def _set_whole(self, whole: bool) -> None:
        for model in self.models:
            for unit in find_units(model):
                unit.set_reshard_after_forward(not whole, recurse=False)
                if whole:
                    unit.unshard()
                else:
                    unit.reshard()


class ShardedGradients(GradientExchange):
    """All-reduces the gradients that FSDP2 leaves out: of aggregations over several batches, and of unused parameters.

    FSDP2 averages all gradients of a backward pass, in any order of passes.
    """

    exchanges = True

    def __init__(self, placed: ShardedPlacement) -> None:
        self._placed = placed
        self._communicates = True
        self.keeps_gradients = False

    def begin_batch(self, communicate: bool) -> None:
        if communicate != self._communicates:
            self._communicates = communicate
            for model in self._placed.models:
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(communicate)
        self.keeps_gradients |= not communicate
        share_buffers(self._placed.models)

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        self._placed.whole.find()
        super().backward(loss, gradient, retain_graph, create_graph)

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """All-reduce kept gradients; remove those of parameters that no rank has used."""
        parameters = list_parameters(optimizer)
        here = self._placed.whole.take_used(parameters)
        kept = self._placed.whole.hold_gradients(parameters)
        anywhere = torch.tensor([here, kept], dtype=torch.int32, device=self._placed.device)
        dist.all_reduce(anywhere)
        # Reading the result waits for the GPU; not needed if this rank has used all parameters.
        if not self.keeps_gradients and all(here):
            return
        for parameter, used, is_kept in zip(parameters, *anywhere.tolist(), strict=True):
            if is_kept:
                parameter.grad = self.with_kept(parameter)
                self._placed.whole[parameter].grad = None
            elif not used:
                # FSDP2 has filled in zeros, with which weight decay and momentum would still act.
                parameter.grad = None

    def with_kept(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the gradient of a sharded parameter, with the average of the gradients that ranks keep."""
        whole = self._placed.whole[parameter]
        average = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self._placed.device)
        if whole.grad is not None:
            average.copy_(whole.grad)
        dist.all_reduce(average.div_(dist.get_world_size()))
        sharded = shard_like(average, parameter)
        return sharded if parameter.grad is None else parameter.grad + sharded

    def agree(self, flag: torch.Tensor) -> None:
        dist.all_reduce(flag, dist.ReduceOp.MAX)


def share_buffers(models: list[torch.nn.Module]) -> None:
    """Give all ranks the chief's buffers, as Determined's data-parallel training does."""
    buffers = [buffer for model in models for buffer in model.buffers()]
    exchange_flat(buffers, lambda flat: dist.broadcast(flat, 0))


class ShardedStates(ModelStates):
    """The states of sharded models and optimizers: gathered on the chief or left in shards, and loaded."""

    is_sharded = True

    def __init__(self, placed: ShardedPlacement, gradients: ShardedGradients, writes_shards: bool) -> None:
        self._placed = placed
        self._gradients = gradients
        self._gathers = True
        self.writes_shards = writes_shards

    @contextlib.contextmanager
    def in_shards(self) -> Iterator[None]:
        self._gathers = not self.writes_shards
        try:
            yield
        finally:
            self._gathers = True

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        return self.gather(model.state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return gather_optimizer(optimizer) if self._gathers else optimizer.state_dict()

    def load_model(self, model: torch.nn.Module, weights: dict[str, Any]) -> None:
        current = model.state_dict()
        model.load_state_dict({name: shard_if_alike(value, current.get(name)) for name, value in weights.items()})

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        load_into_optimizer(optimizer, state)

    def gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        named = dict(model.named_parameters())
        held = self._placed.whole.hold_gradients(named.values())
        kept = torch.tensor(held, dtype=torch.int32, device=self._placed.device)
        if self._gradients.keeps_gradients and named:
            dist.all_reduce(kept)
        found: dict[str, torch.Tensor] = {}
        for (name, parameter), is_kept in zip(named.items(), kept.tolist(), strict=True):
            grad = self._gradients.with_kept(parameter) if is_kept else parameter.grad
            if grad is not None:
                found[name] = grad
        return self.gather(found)

    def load_gradients(self, model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
        self._placed.whole.find()
        for name, parameter in model.named_parameters():
            grad = saved.get(name)
            self._placed.whole[parameter].grad = None
            parameter.grad = None if grad is None else self.place_like(parameter, grad)

    def gather(self, tensors: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        return gather_tensors(tensors) if self._gathers else tensors

    def place_like(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        return shard_like(whole, parameter)


class FSDPBackend(Backend):
    """Trains models sharded by FSDP2."""

    def __init__(
        self,
        device: torch.device,
        policy: Policy | None = None,
        *,
        mixed_precision: MixedPrecisionPolicy | None = None,
        sharded_checkpoints: bool = False,
    ) -> None:
        placed = ShardedPlacement(device, policy, mixed_precision or MixedPrecisionPolicy())
        gradients = ShardedGradients(placed)
        super().__init__(device, placed, gradients, ShardedStates(placed, gradients, sharded_checkpoints))


class WholeParameters:
    """Finds the whole parameter of each sharded one; it holds the gradients that are not yet reduced."""

    def __init__(self) -> None:
        self._whole: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._used: set[torch.nn.Parameter] = set()
        # New models, with the hooks that notice a first run.
        self._unseen: dict[torch.nn.Module, list[RemovableHandle]] = {}
        self._ran: set[torch.nn.Module] = set()

    def add(self, model: torch.nn.Module) -> None:
        """Add a sharded model.

        The parameters are looked up on first use: once a parameter has been whole, the type can no longer change.
        """
        self._unseen[model] = [
            unit.register_forward_pre_hook(lambda *_: self._ran.add(model))  # type: ignore[attr-defined]
            for unit in find_units(model)
        ]

    def can_be_cast(self, model: torch.nn.Module) -> bool:
        """Return whether no parameter of ``model`` has been whole since it was sharded."""
        return model in self._unseen and model not in self._ran

    def find(self) -> None:
        """Find the parameters of all new models; all ranks call this."""
        for model, hooks in self._unseen.items():
            for hook in hooks:
                hook.remove()
            for unit in find_units(model):
                self._find_whole(model, unit)
        self._unseen.clear()

    def _find_whole(self, model: torch.nn.Module, unit: FSDPModule) -> None:
        sharded = dict(model.named_parameters())
        unit.unshard()
        for name, parameter in model.named_parameters():
            if parameter is not sharded[name]:
                self._whole[sharded[name]] = parameter
                watch_gradient(parameter, self._used.add)
        unit.reshard()

    def __getitem__(self, sharded: torch.nn.Parameter) -> torch.nn.Parameter:
        return self._whole[sharded]

    def add_replacements(self, others: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
        """Add an optimizer's substitutes for sharded parameters, with the same whole parameters."""
        self._whole.update({other: self._whole[sharded] for sharded, other in others.items()})

    def forget(self, others: Iterable[torch.nn.Parameter]) -> None:
        """Remove substitutes from :meth:`add_replacements` that no optimizer has any more."""
        for other in others:
            del self._whole[other]

    def take_used(self, sharded: Iterable[torch.nn.Parameter]) -> list[bool]:
        """Return for each parameter whether this rank has computed a gradient, and clear the record."""
        used = [self._whole[parameter] in self._used for parameter in sharded]
        self._used.difference_update(self._whole[parameter] for parameter in sharded)
        return used

    def hold_gradients(self, sharded: Iterable[torch.nn.Parameter]) -> list[bool]:
        """Return for each parameter whether this rank has gradients that are not yet reduced."""
        return [self._whole[parameter].grad is not None for parameter in sharded]

    def clear(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Remove gradients that are not yet reduced; parameters that are whole now, as in a validation, are skipped."""
        for parameter in parameters:
            if parameter in self._whole:
                self._whole[parameter].grad = None


def find_units(model: torch.nn.Module) -> Iterator[FSDPModule]:
    """Yield the separately sharded modules of ``model``."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def clear_first(holder: Any, clear: Callable[[], None]) -> None:
    """Make ``holder.zero_grad()`` call ``clear`` first, since kept gradients are not on the sharded parameters."""
    zero_grad = holder.zero_grad

    def clear_all(set_to_none: bool = True) -> None:
        clear()
        zero_grad(set_to_none)

    holder.zero_grad = clear_all
