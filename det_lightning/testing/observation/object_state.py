"""The state of a trial's objects: each value that the trial can reach, by path, comparable between runs."""

from __future__ import annotations

import argparse
import collections
import collections.abc
import contextlib
import copy
import dataclasses
import datetime
import enum
import itertools
import operator
import pathlib
import random
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from det_lightning.checkpoint.format.standard_values import list_slots
from det_lightning.pytorch._callback import PyTorchCallback
from det_lightning.pytorch._reducer import MetricReducer
from det_lightning.testing.recorder import describe, is_lazy

_PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, datetime.date, datetime.timedelta, pathlib.PurePath,
          torch.device, torch.dtype, torch.Size)  # fmt: skip
_CODE = (type, types.ModuleType, types.BuiltinFunctionType, types.MethodType)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# The training loop creates objects of these classes.
_NO_STATE = (DataLoader,)
# The first kind that fits is taken.
_KINDS: dict[str, tuple[type, ...]] = {
    "metric": (torchmetrics.Metric,),
    "model": (torch.nn.Module,),
    "optimizer": (torch.optim.Optimizer,),
    "scheduler": (LRScheduler,),
    "callback": (PyTorchCallback,),
    "data": (Dataset, Sampler),
    "reducer": (MetricReducer,),
}
_PARTS = {"the hyperparameters": "hyperparameters", "the environment": "environment"}
# Attributes of a module besides its weights and the user's own.
_OF_TORCH_MODULE = set(vars(torch.nn.Module())) | {"training"}
_MANY = 400
#: The largest number of values to visit.
MAX_LEAVES = 60_000
_MAX_ELEMENTS = 4_000_000


@dataclasses.dataclass(frozen=True)
class Holder:
    """The owner of a value, as the user would call it."""

    kind: str  # "trial", "class", "module", "object", "stateful", or a key of _KINDS
    path: str  # such as "trial.model"
    type_name: str
    wrapped: bool = False  # whether the holder belongs to a wrapped model, optimizer or scheduler


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A value and its position, in plain values, which can be pickled."""

    text: str  # of the value or its description
    holder: Holder
    root: tuple[str, str]  # label and attribute of the outermost object
    direct: bool  # whether the value is the attribute's own rather than nested
    trains: bool = False  # whether the value is a tensor that requires a gradient

    @property
    def is_array(self) -> bool:
        return self.text.startswith("{")  # a description; a dict is not a leaf


ObjectState = dict[str, Leaf]


def read_state(
    modules: list[types.ModuleType],
    trial: Any,
    context: Any,
    callbacks: dict[str, Any],
    parts: dict[str, Any],
    reducers: list[Any],
) -> ObjectState:
    """Return each value that the trial, its callbacks, the globals of its modules, and further ``parts`` can reach.

    Only what a reset leaves in ``reducers``, which the training loop resets, is state.
    """
    own_modules = {module.__name__ for module in modules} | {type(trial).__module__}
    # Callbacks are visited below, even if other objects refer to callbacks too.
    walk = _Walk(context, own_modules, [trial, *callbacks.values()], reducers)
    walk.attributes(Holder("trial", "trial", type(trial).__name__), "trial", vars(trial))
    for name, callback in callbacks.items():
        holder = Holder("callback", f"callback {name!r}", type(callback).__name__)
        walk.attributes(holder, holder.path, vars(callback))
    for module in modules:
        walk.module(module)
    for watched in (trial, *callbacks.values()):  # their classes may be replaced, for observation
        for cls in (cls for cls in reversed(type(watched).__mro__) if cls.__module__ in own_modules):
            walk.class_attributes(cls)
    for path, part in parts.items():
        walk.part(path, part)
    return walk.found


class _Walk:
    def __init__(self, context: Any, own_modules: set[str], known: list[Any], reducers: list[Any]) -> None:
        self.found: ObjectState = {}
        self._own_modules = own_modules
        self._seen = {id(context), *map(id, known)}
        self._kept: list[Any] = []  # so that ids are not reused
        self._root = ("", "")
        self._reducers = reducers
        self._wrapped = {id(module) for model in context.models for module in model.modules()}
        self._wrapped |= {id(optimizer) for optimizer in context.optimizers}
        self._wrapped |= {id(wrapped.scheduler) for wrapped in context.lr_schedulers}

    def attributes(self, holder: Holder, path: str, attributes: collections.abc.Mapping[str, Any]) -> None:
        for name, value in list(attributes.items()):
            self._root = (holder.path, name)
            self._visit(value, f"{path}.{name}", holder, direct=True)

    def part(self, path: str, part: Any) -> None:
        """Visit an object, unless the trial holds it and it was therefore visited already."""
        self._root = (path, "")
        self._visit(part, path, Holder(_PARTS.get(path, "data"), path, type(part).__name__))

    def module(self, module: types.ModuleType) -> None:
        """Visit the data in the globals and the classes of a module."""
        public = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        data = {name: value for name, value in public.items() if not isinstance(value, type | types.ModuleType)}
        self.attributes(Holder("module", module.__name__, "module"), module.__name__, data)
        for cls in public.values():
            if isinstance(cls, type) and cls.__module__ == module.__name__:
                self.class_attributes(cls)

    def class_attributes(self, cls: type) -> None:
        public = {name: value for name, value in vars(cls).items() if not name.startswith("__") and name != "_abc_impl"}
        self.attributes(Holder("class", cls.__qualname__, "class"), cls.__qualname__, public)

    def _visit(self, value: Any, path: str, holder: Holder, direct: bool = False) -> None:
        if len(self.found) >= MAX_LEAVES:
            return
        if isinstance(value, _PLAIN):
            self._add(path, value, holder, direct)
        elif not isinstance(value, _CODE) and id(value) not in self._seen:
            self._seen.add(id(value))
            self._kept.append(value)
            self._visit_object(value, path, holder, direct)

    def _add(self, path: str, value: Any, holder: Holder, direct: bool, trains: bool = False) -> None:
        self.found[path] = Leaf(repr(value), holder, self._root, direct, trains)

    def _visit_object(self, value: Any, path: str, holder: Holder, direct: bool) -> None:
        if isinstance(value, _GENERATORS):
            self._add(path, _describe_generator(value), holder, direct)
        elif isinstance(value, torch.Tensor):
            if value.device.type != "meta" and not is_lazy(value):
                self._add(path, describe(_sample(value)), holder, direct, value.requires_grad and value.is_leaf)
        elif isinstance(value, np.ndarray | np.generic):
            described = repr(value)[:_MANY] if value.dtype.kind == "O" else describe(_sample(value))
            self._add(path, described, holder, direct)
        elif isinstance(value, dict):
            self._items([(f"{path}[{key!r:.60}]", item) for key, item in value.items()], path, holder)
        elif isinstance(value, list | tuple | collections.deque):
            self._items([(f"{path}[{index}]", item) for index, item in enumerate(value)], path, holder)
        elif isinstance(value, collections.abc.Iterator):
            self._iterator(value, path, holder, direct)
        elif isinstance(value, set | frozenset):
            self._add(path, sorted(map(repr, value))[:_MANY], holder, direct)
        elif (kind := self._kind(value)) is not None:
            inner = Holder(kind, path, type(value).__name__, id(value) in self._wrapped)
            if any(value is reducer for reducer in self._reducers):
                value = _reset_copy(value)
            if kind == "model" and holder.kind == "model" and inner.wrapped == holder.wrapped:
                inner = holder
            for suffix, item in _list_parts(value, kind):
                self._visit(item, f"{path}{suffix}", inner)

    def _iterator(self, value: Any, path: str, holder: Holder, direct: bool) -> None:
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
        self._add(path, ("length", len(items)), holder, False)
        for item_path, item in items if len(items) <= _MANY else items[: _MANY // 2] + items[-_MANY // 2 :]:
            self._visit(item, item_path, holder)

    def _kind(self, value: Any) -> str | None:
        """Return the kind of an object; None if the object is not to be visited."""
        if isinstance(value, _NO_STATE):
            return None
        module = getattr(value, "__module__", "")  # a function's own
        known = [kind for kind, types_of_kind in _KINDS.items() if isinstance(value, types_of_kind)]
        if known or module in self._own_modules or isinstance(value, _NAMESPACES):
            return [*known, "object"][0]
        stateful = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
        return "stateful" if stateful and not module.startswith("det_lightning") else None


def _reset_copy(reducer: Any) -> Any:
    """Return a copy of a reducer after a reset; None if it cannot be copied."""
    with contextlib.suppress(Exception):  # it may hold locks or files
        copied = copy.deepcopy(reducer)
        copied.reset()
        return copied
    return None


def _list_parts(value: Any, kind: str) -> Iterable[tuple[str, Any]]:
    if kind == "metric":
        return [(f".{name}", item) for name, item in getattr(value, "metric_state", {}).items()]
    if kind == "model":
        own = [(name, item) for name, item in vars(value).items() if name not in _OF_TORCH_MODULE]
        weights = [*value.named_parameters(recurse=False), *value.named_buffers(recurse=False)]
        return [(f".{name}", item) for name, item in [*weights, *own, *value.named_children()]]
    if kind in ("optimizer", "scheduler", "stateful"):
        with contextlib.suppress(Exception):  # the state_dict() of a foreign class may need arguments
            state = value.state_dict()
            if kind == "optimizer":
                groups = [{n: v for n, v in group.items() if n != "params"} for group in state["param_groups"]]
                state = {**state, "param_groups": groups}
            return [("", state)]
        return []
    slots = {name: getattr(value, name) for name in list_slots(type(value)) if hasattr(value, name)}
    attributes = slots | getattr(value, "__dict__", {})
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        attributes |= {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
        attributes["defaults"] = (value.__defaults__, value.__kwdefaults__)
    return [(f".{name}", item) for name, item in attributes.items()]


def _sample(array: Any) -> Any:
    """Return an array, or evenly spaced elements of an array that is too large to be described often."""
    step = int(np.prod(array.shape)) // _MAX_ELEMENTS + 1
    is_dense = not isinstance(array, torch.Tensor) or array.layout is torch.strided
    return array.reshape(-1)[::step] if step > 1 and is_dense else array


def _describe_generator(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return str(describe(value.get_state())["digest"])
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return repr(value.getstate() if isinstance(value, random.Random) else value.get_state())
