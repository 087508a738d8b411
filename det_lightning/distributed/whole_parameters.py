"""The whole parameters of FSDP2: substitutes for sharded parameters while a unit runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from det_lightning.distributed.backend import watch_gradient


class WholeParameters:
    """Finds the whole parameter of each sharded parameter; a whole parameter holds gradients before an exchange."""

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
        """Return for each parameter whether this rank has gradients before an exchange."""
        return [self._whole[parameter].grad is not None for parameter in sharded]

    def clear(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Remove gradients before an exchange; parameters now whole, as in a validation, are skipped."""
        for parameter in parameters:
            if parameter in self._whole:
                self._whole[parameter].grad = None


def find_units(model: torch.nn.Module) -> Iterator[FSDPModule]:
    """Yield the separately sharded modules of ``model``."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def clear_first(holder: Any, clear: Callable[[], None]) -> None:
    """Make ``holder.zero_grad()`` call ``clear`` first: sharded parameters do not know of kept gradients."""
    zero_grad = holder.zero_grad

    def clear_all(set_to_none: bool = True) -> None:
        clear()
        zero_grad(set_to_none)

    holder.zero_grad = clear_all
