"""Optimizers that are not torch's, in the form that Lightning asks for."""

from __future__ import annotations

from typing import Any

import torch


class PlainOptimizer:
    """An optimizer with the attributes that Lightning looks at, which an optimizer that is not torch's may lack.

    The trial steps the optimizer itself; Lightning only saves and loads its state.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.param_groups: list[dict[Any, Any]] = getattr(optimizer, "param_groups", [])
        self.defaults: dict[Any, Any] = getattr(optimizer, "defaults", {})
        self.state: Any = getattr(optimizer, "state", {})

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self._optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)


def as_torch_optimizer(optimizer: Any) -> Any:
    """Return one of torch's optimizers unchanged, and any other one as a :class:`PlainOptimizer`."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else PlainOptimizer(optimizer)
