"""Reads the weights of a checkpoint that holds objects elsewhere: a placeholder takes the place of each of those.

A placeholder takes any arguments, state and items, keeps nothing, and calls nothing.
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import pickletools
from collections.abc import Mapping
from typing import IO, Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.lightning_file import TRIAL_KEY
from det_lightning.checkpoint.safe_load.stand_ins import is_allowed, list_declared, list_slots, spell_name
from det_lightning.checkpoint.safe_load.state_file import read_state

# The entries of state files that whoever wants weights and settings needs; they must hold no objects.
_NEEDED = ("models_state_dict", "model_state_dict", "state_dict", "settings", "load_data", "trial_state")
# Each of these operations gives items to a container; torch's reader gives these to plain ones only. For a placeholder
# they become a state, in a tuple.
_AS_STATE = {
    "APPEND": pickle.BUILD,
    "APPENDS": pickle.TUPLE + pickle.BUILD,
    "SETITEM": pickle.TUPLE2 + pickle.BUILD,
    "SETITEMS": pickle.TUPLE + pickle.BUILD,
}
_POPS = {"APPEND": 1, "SETITEM": 2, "BUILD": 1, "REDUCE": 2, "NEWOBJ": 2, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_POPS |= {"BINPERSID": 1}
# What these operations leave on the stack in place of what they take from it.
_MAKES = {"REDUCE", "NEWOBJ", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINPERSID"}


class Placeholder:
    """Stands where a checkpoint has an object that is not read."""

    def __new__(cls, *_: Any) -> Placeholder:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


# How a pickle refers to it.
_NAME = pickle.GLOBAL + f"{Placeholder.__module__}\n{Placeholder.__qualname__}\n".encode()


def read_weights(path: pathlib.Path | IO[bytes], *, trusted: bool = False, **arguments: Any) -> dict[str, Any]:
    """Read a state file as ``read_state`` does, for its weights and settings.

    Placeholders stand for objects in other entries; objects among the weights raise what ``read_state`` raises.
    """
    try:
        return read_state(path, trusted=trusted, **arguments)
    except errors.UnsafeCheckpointError as refused:
        if not isinstance(path, pathlib.Path):
            path.seek(0)
        try:
            with torch.serialization.safe_globals([Placeholder]):
                state = read_state(path, prepare=_put_placeholders, **arguments)
        except errors.CheckpointError:
            raise refused from None
        entry = state.get(TRIAL_KEY)  # a .ckpt file has the settings in there
        inner = [entry.get(name) for name in ("resume", "extra")] if isinstance(entry, dict) else []
        parts = [part for part in (state, entry, *inner) if isinstance(part, dict)]
        if any(holds_placeholder(part.get(name)) for part in parts for name in _NEEDED):
            raise
        return state


def holds_placeholder(value: Any) -> bool:
    """Return whether there is a placeholder in a value: in its containers, their keys or its attributes."""
    left = [value]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if isinstance(one, Placeholder) or one is Placeholder:
            return True
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            left += [*one.keys(), *one.values(), getattr(one, "default_factory", None)]
        elif isinstance(one, list | tuple | set | frozenset | collections.deque):
            left += one
        elif isinstance(one, slice):
            left += [one.start, one.stop, one.step]
        if isinstance(attributes := getattr(one, "__dict__", None), dict):
            left.append(attributes)
        left += [getattr(one, name, None) for name in list_slots(type(one))]
    return False


def _put_placeholders(pickled: bytes) -> bytes:
    """Return a pickle that refers to placeholders where the given one refers to names that are not read."""
    file = io.BytesIO(pickled)
    walk = _Walk()
    parts = []
    begin = 0
    for operation, argument, position in pickletools.genops(file):
        if (replacement := walk.step(operation.name, argument)) is not None:
            parts += [pickled[begin:position], replacement]
            begin = file.tell()
    return b"".join([*parts, pickled[begin:]])


class _Walk:
    """Knows for each value on the stack of a pickle's reader whether it is a placeholder."""

    def __init__(self) -> None:
        self._stack: list[bool] = []
        self._outer: list[list[bool]] = []
        self._memo: dict[Any, bool] = {}
        self._declared = list_declared()

    def step(self, name: str, argument: Any) -> bytes | None:
        """Follow an operation; return what replaces it, or None if it stays."""
        stack = self._stack
        if name == "MARK":
            self._outer.append(stack)
            self._stack = []
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "GLOBAL":
            full = spell_name(*str(argument).split(" ", 1))
            stack.append(not is_allowed(full) and full not in self._declared)
            return _NAME if stack[-1] else None
        elif name in _POPS or name in ("TUPLE", "APPENDS", "SETITEMS"):
            return self._take(name)
        elif name not in ("PROTO", "STOP"):
            stack.append(False)
        return None

    def _take(self, name: str) -> bytes | None:
        if name in _POPS:
            taken = self._stack[-_POPS[name] :]
            del self._stack[-_POPS[name] :]
        else:
            taken = []
            self._stack = self._outer.pop()
        if name in _MAKES:
            self._stack.append(name in ("REDUCE", "NEWOBJ") and taken[0])
        return _AS_STATE[name] if name in _AS_STATE and self._stack[-1] else None
