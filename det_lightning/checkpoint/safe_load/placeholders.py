"""Reading the weights of a checkpoint with objects besides the weights: placeholders take the objects' places.

A placeholder takes any arguments, state and items, keeps nothing, and calls nothing.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import pathlib
from collections.abc import Container, Mapping
from typing import IO, Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.lightning_file import TRIAL_KEY
from det_lightning.checkpoint.format.standard_values import list_slots
from det_lightning.checkpoint.safe_load.pickle_scanner import put_placeholders
from det_lightning.checkpoint.safe_load.safe_globals import ALLOWED, TENSORS
from det_lightning.checkpoint.safe_load.state_file import read_state

# The entries of state files that whoever wants weights and settings needs; they must hold no objects.
_NEEDED = ("models_state_dict", "model_state_dict", "state_dict", "settings", "load_data", "trial_state")


class Placeholder:
    """Takes the place of an object that is not read."""

    def __new__(cls, *_: Any) -> Placeholder:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def read_weights(path: pathlib.Path | IO[bytes], *, trusted: bool = False, **arguments: Any) -> dict[str, Any]:
    """Read a state file for weights and settings, with the arguments of ``read_state``.

    Placeholders stand for objects in other entries, or for all objects there if a ``trusted`` file's cannot be made.
    Objects among the weights raise the errors of ``read_state``.
    """
    try:
        return read_state(path, trusted=trusted, **arguments)
    except errors.CheckpointError as refused:
        if not (trusted or isinstance(refused, errors.UnsafeCheckpointError)):
            raise
        state = _read_with_placeholders(path, ALLOWED, arguments) or _read_with_placeholders(path, TENSORS, arguments)
        if state is None:
            raise refused from None
        entry = state.get(TRIAL_KEY)  # a .ckpt file has the settings in there
        inner = [entry.get(name) for name in ("resume", "extra")] if isinstance(entry, dict) else []
        parts = [part for part in (state, entry, *inner) if isinstance(part, dict)]
        if any(holds_placeholder(part.get(name)) for part in parts for name in _NEEDED):
            raise
        return state


def _read_with_placeholders(
    path: pathlib.Path | IO[bytes], kept: Container[str], arguments: dict[str, Any]
) -> dict[str, Any] | None:
    """Read a state file with placeholders for all names but those ``kept``; return None if the rest cannot be read."""
    prepare = functools.partial(put_placeholders, placeholder=Placeholder, kept=kept)
    with torch.serialization.safe_globals([Placeholder]), contextlib.suppress(errors.CheckpointError):
        return read_state(path, prepare=prepare, **arguments)
    return None


def holds_placeholder(value: Any) -> bool:
    """Return whether there is a placeholder in a value: in containers, keys of dicts or attributes."""
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
