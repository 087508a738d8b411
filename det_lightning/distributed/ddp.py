"""DDP: a trial's models are replicated over the ranks, and gradients all-reduced."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from det_lightning import errors
from det_lightning.distributed.backend import (
    Backend,
    GradientExchange,
    ModelPlacement,
    ModelStates,
    WeightCast,
    exchange_flat,
    list_parameters,
    watch_gradient,
)

# The end of torch's message when a backward pass has left parameters out.
_UNUSED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


class ModelDDP(DistributedDataParallel):
    """A model whose gradients are all-reduced during the backward pass; it has the model's attributes.

    Any order of forward and backward passes keeps the ranks equal. ``DistributedDataParallel`` averages a gradient once
    after each forward pass, and silently ignores further backward passes; this class notices them, and
    :meth:`average_rest` all-reduces the rest. While ``communicates`` is false, an aggregation keeps gradients.
    ``arguments`` are those of ``DistributedDataParallel``.
    """

    def __init__(self, module: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
        device = next(module.parameters()).device
        super().__init__(module, device_ids=[device.index] if device.type == "cuda" else None, **arguments)
        self._reduced = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.communicates = True
        self._evaluates = False
        self._will_average = False
        self._was_averaged = False
        self._local_only: set[torch.nn.Parameter] = set()
        for parameter in module.parameters():
            watch_gradient(parameter, functools.partial(self._note_gradient, averaged_by_ddp=parameter.requires_grad))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        module: Any = self.module
        return module[key]

    def _note_gradient(self, changed: torch.nn.Parameter, averaged_by_ddp: bool) -> None:
        """Record whether a changed gradient differs between ranks."""
        if averaged_by_ddp and self._will_average:
            self._was_averaged = True
            self._local_only.discard(changed)
        else:
            self._local_only.add(changed)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; the next backward pass averages the gradients, if any are wanted."""
        if self._evaluates:
            return self.module(*inputs, **kwargs)
        if self.static_graph and not self.communicates:
            raise errors.InvalidExperimentException(
                "static_graph=True all-reduces gradients in every batch, and an aggregation only in its last one. "
                "Leave out static_graph, or train with aggregation_frequency=1."
            )
        wanted = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.module.parameters())
        self._will_average = self.communicates and wanted
        # If no gradients are averaged, DDP must not wait for gradients either.
        self.require_backward_grad_sync = self._will_average
        self.require_forward_param_sync = self.communicates
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as e:
            if unused := _UNUSED.search(str(e)):
                raise errors.InvalidExperimentException(self._explain([int(i) for i in unused[1].split()])) from e
            raise

    def _explain(self, unused: list[int]) -> str:
        names = ", ".join(self._reduced[index] for index in unused[:5]) + (", ..." if len(unused) > 5 else "")
        return (
            f"{len(unused)} parameters of a {type(self.module).__name__} got no gradient in a batch, and all ranks "
            f"wait for them: {names}. Freeze unused parameters (requires_grad_(False) before wrap_model()), or choose "
            "strategy='trial_ddp_find_unused_parameters_true' to look for unused parameters in every batch."
        )

    def begin_evaluation(self) -> None:
        """Give all ranks the chief's buffers, so that no forward pass waits for another rank.

        Ranks may validate different numbers of batches, and ``DistributedDataParallel`` would broadcast the buffers
        (statistics of batch norms) in each forward pass.
        """
        self.require_forward_param_sync = True  # even in the middle of an aggregation
        if self.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            self._sync_buffers()  # type: ignore[no-untyped-call]
        self._evaluates = True

    def end_evaluation(self) -> None:
        self._evaluates = False

    def end_backward(self) -> None:
        """Record the end of a backward pass that may have averaged this model's gradients."""
        if self._was_averaged:
            self._will_average = self._was_averaged = False

    def average_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        rest = [parameter for parameter in parameters if parameter in self._local_only]
        self._local_only.difference_update(rest)
        gradients = [parameter.grad for parameter in rest if parameter.grad is not None]
        exchange_flat(gradients, lambda flat: dist.all_reduce(flat.div_(dist.get_world_size())))


class ReplicatedPlacement(ModelPlacement):
    """Wraps each model with gradients to average in a :class:`ModelDDP`, listed in ``models``."""

    def __init__(self, device: torch.device, arguments: Mapping[str, Any]) -> None:
        super().__init__(device)
        self._arguments = arguments
        self.models: list[ModelDDP] = []

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        model = super().wrap_model(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # there is nothing to average
        wrapped = ModelDDP(model, self._arguments)
        self.models.append(wrapped)
        return wrapped

    def cast_weights(self, model: torch.nn.Module, casting: WeightCast) -> torch.nn.Module:
        """Cast the model, and wrap the new parameters in a new :class:`ModelDDP`."""
        if not isinstance(model, ModelDDP):
            return super().cast_weights(model, casting)
        casting.renew(model.module)
        changed = ModelDDP(model.module, self._arguments)
        self.models[self.models.index(model)] = changed
        return changed

    def begin_validation(self, in_step: bool) -> None:
        for model in self.models:
            model.begin_evaluation()

    def end_validation(self) -> None:
        for model in self.models:
            model.end_evaluation()


class ReplicatedGradients(GradientExchange):
    """All-reduces the gradients that backward passes of :class:`ModelDDP` left out."""

    exchanges = True

    def __init__(self, models: list[ModelDDP]) -> None:
        self._models = models

    def begin_batch(self, communicate: bool) -> None:
        for model in self._models:
            model.communicates = communicate

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        super().backward(loss, gradient, retain_graph, create_graph)
        for model in self._models:
            model.end_backward()

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        self.average_rest(list_parameters(optimizer))

    def average_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        parameters = list(parameters)
        for model in self._models:
            model.average_rest(parameters)

    def agree(self, flag: torch.Tensor) -> None:
        dist.all_reduce(flag, dist.ReduceOp.MAX)


class DDPBackend(Backend):
    """Trains each wrapped model as a :class:`ModelDDP`, made with ``arguments`` of ``DistributedDataParallel``."""

    def __init__(self, device: torch.device, **arguments: Any) -> None:
        placement = ReplicatedPlacement(device, arguments)
        super().__init__(device, placement, ReplicatedGradients(placement.models), ModelStates())
