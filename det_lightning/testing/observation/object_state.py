"""The state of a trial's objects: every value that its attributes lead to, by path, comparable from run to run."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import dataclasses
import datetime
import enum
import itertools
import operator
import pathlib
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, Sampler

from det_lightning.pytorch.callback import PyTorchCallback
from det_lightning.pytorch.reducers import MetricReducer
from det_lightning.testing.recorder import describe

__all__ = ["Holder", "Leaf", "ObjectState", "StateReader"]

_PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, datetime.date, datetime.timedelta, pathlib.PurePath)
_PLAIN_OF_TORCH = (torch.device, torch.dtype, torch.Size)
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
# What torch keeps in a module besides weights and the user's own attributes.
_OF_TORCH_MODULE = set(vars(torch.nn.Module())) | {"training"}
_MANY = 400
_MAX_LEAVES = 60_000


@dataclasses.dataclass(frozen=True)
class Holder:
    """The object that a value belongs to, as the user would name it.

    Attributes:
        kind: ``"trial"``, ``"callback"``, ``"model"``, ``"optimizer"``, ``"scheduler"``, ``"data"``, ``"object"``,
            ``"class"`` or ``"module"``.
        path: how one gets to it, such as ``"trial.model"``.
        type_name: of its class.
        wrapped: it belongs to a model, optimizer or scheduler that was wrapped.
    """

    kind: str
    path: str
    type_name: str
    wrapped: bool = False


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A value and where it is.

    Attributes:
        value: itself, or a description of it; equal values have the same ``repr()``.
        holder: the object that it belongs to.
        root: label and attribute of the outermost object.
        direct: it is the very value of that attribute.
    """

    value: Any
    holder: Holder = dataclasses.field(compare=False)
    root: tuple[str, str] = dataclasses.field(compare=False)
    direct: bool = dataclasses.field(compare=False)


ObjectState = dict[str, Leaf]


class StateReader:
    """Reads the state of trials whose code is in given modules.

    Args:
        modules: returns the modules of the trial's own code.
    """

    def __init__(self, modules: Callable[[], list[types.ModuleType]]) -> None:
        self._modules = modules

    def read(self, trial: Any, context: Any, callbacks: dict[str, Any]) -> ObjectState:
        """Return every value that trial, callbacks and the globals of their modules lead to."""
        modules = self._modules()
        own_modules = {module.__name__ for module in modules} | {type(trial).__module__}
        # A callback is a callback wherever else it is referred to.
        walk = _Walk(context, own_modules, known=[trial, *callbacks.values()])
        walk.attributes(trial, Holder("trial", "trial", type(trial).__name__))
        for name, callback in callbacks.items():
            label = f"callback {name!r}"
            walk.attributes(callback, Holder("callback", label, type(callback).__name__))
        for module in modules:
            walk.module(module)
        return walk.found


class _Walk:
    """One walk over everything."""

    def __init__(self, context: Any, own_modules: set[str], known: list[Any]) -> None:
        self.found: ObjectState = {}
        self._own_modules = own_modules
        self._seen = {id(context), *map(id, known)}
        self._kept: list[Any] = []  # so that ids stay their own
        self._root = ("", "")
        self._wrapped = {id(module) for model in context.models for module in model.modules()}
        self._wrapped |= {id(optimizer) for optimizer in context.optimizers}
        self._wrapped |= {id(wrapped.scheduler) for wrapped in context.lr_schedulers}

    def attributes(self, owner: Any, holder: Holder) -> None:
        """Walk over the attributes of a trial or a callback."""
        for name, value in vars(owner).items():
            self._root = (holder.path, name)
            self._visit(value, f"{holder.path}.{name}", holder, direct=True)

    def module(self, module: types.ModuleType) -> None:
        """Walk over the data in the globals of a module, and on the classes that it defines."""
        holder = Holder("module", module.__name__, "module")
        for name, value in list(vars(module).items()):
            if name.startswith("__") or isinstance(value, types.ModuleType):
                continue
            self._root = (holder.path, name)
            if isinstance(value, type) and value.__module__ == module.__name__:
                self._class(value)
            else:
                self._visit(value, f"{module.__name__}.{name}", holder, direct=True)

    def _class(self, cls: type) -> None:
        holder = Holder("class", cls.__qualname__, "class")
        for name, value in list(vars(cls).items()):
            if not name.startswith("__") and name != "_abc_impl":
                self._root = (holder.path, name)
                self._visit(value, f"{cls.__qualname__}.{name}", holder, direct=True)

    def _visit(self, value: Any, path: str, holder: Holder, direct: bool = False) -> None:
        if len(self.found) >= _MAX_LEAVES:
            return
        if isinstance(value, (*_PLAIN, *_PLAIN_OF_TORCH)):
            self._add(path, (type(value).__name__, value), holder, direct)
        elif not isinstance(value, _CODE) and id(value) not in self._seen:
            self._seen.add(id(value))
            self._kept.append(value)
            self._visit_object(value, path, holder, direct)

    def _add(self, path: str, value: Any, holder: Holder, direct: bool) -> None:
        self.found[path] = Leaf(value, holder, self._root, direct)

    def _visit_object(self, value: Any, path: str, holder: Holder, direct: bool) -> None:
        if isinstance(value, (torch.Generator, np.random.RandomState, np.random.Generator, random.Random)):
            self._add(path, _generator_state(value), holder, direct)
        elif isinstance(value, torch.Tensor):
            if value.device.type != "meta":
                self._add(path, describe(value), holder, direct)
        elif isinstance(value, np.ndarray | np.generic):
            kept = describe(value) if value.dtype.kind != "O" else repr(value)[:_MANY]
            self._add(path, kept, holder, direct)
        elif isinstance(value, dict):
            self._items([(f"{path}[{key!r:.60}]", item) for key, item in value.items()], path, holder)
        elif isinstance(value, list | tuple | collections.deque):
            self._items([(f"{path}[{index}]", item) for index, item in enumerate(value)], path, holder)
        elif isinstance(value, collections.abc.Iterator):
            self._iterator(value, path, holder, direct)
        elif isinstance(value, set | frozenset):
            self._add(path, sorted(map(repr, value))[:_MANY], holder, direct)
        else:
            self._visit_instance(value, path, holder)

    def _iterator(self, value: Any, path: str, holder: Holder, direct: bool) -> None:
        """Take how far an iterator has come, as far as it tells."""
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            position: Any = None if frame is None else (frame.f_lineno, frame.f_lasti)
            self._visit({} if frame is None else dict(frame.f_locals), f"{path}()", holder)
        elif isinstance(value, itertools.count):
            position = repr(value)
        else:
            position = getattr(value, "_num_yielded", None) or operator.length_hint(value, -1)
        self._add(path, ("iterator", position), holder, direct)

    def _items(self, items: list[tuple[str, Any]], path: str, holder: Holder) -> None:
        self._add(f"len({path})", len(items), holder, False)
        for item_path, item in items if len(items) <= _MANY else items[: _MANY // 2] + items[-_MANY // 2 :]:
            self._visit(item, item_path, holder)

    def _visit_instance(self, value: Any, path: str, holder: Holder) -> None:
        kind = self._kind(value)
        if kind is None:
            return
        inner = Holder(kind, path, type(value).__name__, id(value) in self._wrapped)
        if kind == "model" and holder.kind == "model" and inner.wrapped == holder.wrapped:
            inner = holder
        if isinstance(value, torch.nn.Module):
            self._module_of_torch(value, path, inner)
        elif isinstance(value, torch.optim.Optimizer | LRScheduler | ReduceLROnPlateau) or kind == "stateful":
            with contextlib.suppress(Exception):  # of a class of others, whose state_dict() may want arguments
                self._visit(_state_dict(value), path, inner)
        else:
            attributes = getattr(value, "__dict__", {})
            for name, item in list(attributes.items()):
                self._visit(item, f"{path}.{name}", inner)

    def _module_of_torch(self, model: torch.nn.Module, path: str, holder: Holder) -> None:
        named = [*model.named_parameters(recurse=False), *model.named_buffers(recurse=False)]
        own = [(name, value) for name, value in vars(model).items() if name not in _OF_TORCH_MODULE]
        for name, value in [*named, *own, *model.named_children()]:
            self._visit(value, f"{path}.{name}", holder)

    def _kind(self, value: Any) -> str | None:
        """Return what a value is to the user; None for what is not looked into."""
        module = type(value).__module__
        if isinstance(value, DataLoader | MetricReducer | torchmetrics.Metric):
            return None  # which are begun anew, or reset, by the training loop
        if isinstance(value, torch.nn.Module):
            return "model"
        if isinstance(value, torch.optim.Optimizer):
            return "optimizer"
        if isinstance(value, LRScheduler | ReduceLROnPlateau):
            return "scheduler"
        if isinstance(value, PyTorchCallback):
            return "callback"
        if isinstance(value, Dataset | Sampler):
            return "data"
        if module in self._own_modules:
            return "object"
        stateful = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
        return "stateful" if stateful and not module.startswith("det_lightning") else None


def _generator_state(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return str(describe(value.get_state())["digest"])
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return repr(value.getstate() if isinstance(value, random.Random) else value.get_state())


def _state_dict(value: Any) -> Any:
    state = value.state_dict()
    if isinstance(value, torch.optim.Optimizer) and isinstance(state, dict):
        state = {**state, "param_groups": [_without_parameters(group) for group in state.get("param_groups", [])]}
    return state


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
