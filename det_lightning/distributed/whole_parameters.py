"""The whole parameters that FSDP2 puts in place of sharded ones while their unit runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from det_lightning.distributed.backend import watch_gradient


class WholeParameters:
    """Finds the whole parameter of each sharded one; the whole parameter holds gradients that are not exchanged yet."""

    def __init__(self) -> None:
        self._whole: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._used: set[torch.nn.Parameter] = set()
        # New models, with the hooks that notice a first run.
        self._unseen: dict[torch.nn.Module, list[RemovableHandle]] = {}
        self._ran: set[torch.nn.Module] = set()

    def add(self, model: torch.nn.Module) -> None:
        """Add a sharded model.

        Its parameters are looked up when they are first needed: once one has been whole, its type can no longer change.
        """
        self._unseen[model] = [
            unit.register_forward_pre_hook(lambda *_: self._ran.add(model))  # type: ignore[attr-defined]
            for unit in units_of(model)
        ]

    def can_be_cast(self, model: torch.nn.Module) -> bool:
        """Return whether no parameter of ``model`` has been whole since it was sharded."""
        return model in self._unseen and model not in self._ran

    def find(self) -> None:
        """Find the parameters of all models that are new; all ranks call it."""
        for model, hooks in self._unseen.items():
            for hook in hooks:
                hook.remove()
            for unit in units_of(model):
                self._find_in(model, unit)
        self._unseen.clear()

    def _find_in(self, model: torch.nn.Module, unit: FSDPModule) -> None:
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
        """Add what an optimizer has in place of sharded parameters, with the same whole parameters."""
        self._whole.update({other: self._whole[sharded] for sharded, other in others.items()})

    def forget(self, others: Iterable[torch.nn.Parameter]) -> None:
        """Remove what :meth:`add_replacements` added, once no optimizer has it any more."""
        for other in others:
            del self._whole[other]

    def take_used(self, sharded: Iterable[torch.nn.Parameter]) -> list[bool]:
        """Return which parameters got gradients on this rank, and clear the record."""
        used = [self._whole[parameter] in self._used for parameter in sharded]
        self._used.difference_update(self._whole[parameter] for parameter in sharded)
        return used

    def hold_gradients(self, sharded: Iterable[torch.nn.Parameter]) -> list[bool]:
        """Return which parameters have gradients on this rank that are not exchanged yet."""
        return [self._whole[parameter].grad is not None for parameter in sharded]

    def clear(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Remove gradients that are not exchanged yet; parameters now whole, as in a validation, are skipped."""
        for parameter in parameters:
            if parameter in self._whole:
                self._whole[parameter].grad = None


def units_of(model: torch.nn.Module) -> Iterator[FSDPModule]:
    """Return the modules of ``model`` that are sharded as separate units."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def clear_first(holder: Any, clear: Callable[[], None]) -> None:
    """Make ``holder.zero_grad()`` call ``clear`` first: sharded parameters do not know of kept gradients."""
    zero_grad = holder.zero_grad

    def clear_all(set_to_none: bool = True) -> None:
        clear()
        zero_grad(set_to_none)

    holder.zero_grad = clear_all
