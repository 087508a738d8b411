"""Casting the parameters of models, and giving optimizers other parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.modules.batchnorm import _BatchNorm


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
        """Return whether a module's direct parameters and buffers keep the present type."""
        return self._keep_batchnorm and isinstance(module, _BatchNorm)

    def renew(self, model: torch.nn.Module) -> None:
        """Give ``model`` new parameters; an optimizer may still hold the former."""
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
        """Cast the parameters of ``model`` in place; return for each a new float32 parameter with the former value."""
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
    """Make ``optimizer`` update ``others`` in place of the present parameters, and cast the state likewise."""
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
