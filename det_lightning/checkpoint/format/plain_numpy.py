"""Converts numpy values to plain ones, which ``torch.load(weights_only=True)`` reads without an allow-list."""

from __future__ import annotations

import collections
import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from det_lightning import errors

# A dict with these keys takes the place of a numpy array or scalar.
_TYPE = "numpy_dtype"
_SHAPE = "numpy_shape"
_CONTENT = "numpy_content"

# Booleans, integers, floats, complex numbers, bytes, strings, times: none of them refers to Python objects.
_PLAIN_KINDS = "biufcSUmM"
_MAX_TYPE_CHARS = 32
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)


def without_numpy(value: Any) -> Any:
    """Return ``value``, which stays unchanged, with plain dicts in place of numpy's arrays and scalars.

    They are looked for in dicts, lists and tuples. Arrays of Python objects and of records are left as they are.
    """
    return _Replacement(_describe).of(value)


def with_numpy(value: Any) -> Any:
    """Reverse :func:`without_numpy`; raise an ``InvalidCheckpointException`` if an array is damaged."""
    return _Replacement(functools.partial(_rebuild, set())).of(value)


def with_plain_numbers(value: Any) -> Any:
    """Return ``value`` with Python's numbers in place of numpy's scalars, in dicts, lists and tuples."""
    return _Replacement(_as_number).of(value)


class _Replacement:
    """Replaces values in nested containers. A container in which nothing is replaced stays the same object."""

    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self._replace = replace
        self._done: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Return ``value``, or what takes its place."""
        replaced = self._replace(value)
        if replaced is not value or type(value) not in (*_MAPPINGS, list, tuple):
            return replaced
        if id(value) not in self._done:
            self._done[id(value)] = value  # in case it contains itself
            self._done[id(value)] = self._of_container(value)
        return self._done[id(value)]

    def _of_container(self, value: Any) -> Any:
        if isinstance(value, dict):
            items = {key: self.of(item) for key, item in value.items()}
            if all(items[key] is item for key, item in value.items()):
                return value
            changed = copy.copy(value)  # keeps the versions of modules that torch attaches to a state dict
            changed.update(items)
            return changed
        parts = [self.of(item) for item in value]
        return value if all(part is item for part, item in zip(parts, value, strict=True)) else type(value)(parts)


def _describe(value: Any) -> Any:
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in _PLAIN_KINDS or not value.itemsize:
        return value
    return {
        _TYPE: value.dtype.str,
        _SHAPE: list(value.shape) if isinstance(value, np.ndarray) else None,
        _CONTENT: torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy()),
    }


def _rebuild(used: set[int], value: Any) -> Any:
    """Return the array or scalar of a description; the addresses of contents that were ``used`` grow by its own."""
    if type(value) is not dict or value.keys() != {_TYPE, _SHAPE, _CONTENT}:
        return value
    name = value[_TYPE]
    shape = value[_SHAPE]
    content = value[_CONTENT]
    try:
        dtype = _plain_dtype(name)
        lengths = [] if shape is None else list(shape)
        if not all(type(length) is int and length >= 0 for length in lengths):
            raise ValueError("a shape consists of lengths")
        if not _is_bytes(content) or content.numel() != math.prod(lengths) * dtype.itemsize:
            raise ValueError("its content does not fit")
        address = content.untyped_storage().data_ptr()
        if content.numel() and address in used:  # copies of it could fill the memory
            raise ValueError("another array has the same content")
        used.add(address)
        flat = np.frombuffer(bytearray(content.cpu().numpy().tobytes()), dtype)
        return flat[0] if shape is None else flat.reshape(lengths)
    except (TypeError, ValueError) as e:
        raise errors.InvalidCheckpointException(
            f"The checkpoint is damaged: it has an array of numpy of type {name!r:.50} and shape {shape!r:.50}: {e}."
        ) from e


def _plain_dtype(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str) or len(name) > _MAX_TYPE_CHARS:
        raise TypeError("a type is named by a short string")
    dtype = np.dtype(name)
    if dtype.kind not in _PLAIN_KINDS or not dtype.itemsize or dtype.subdtype:
        raise TypeError("it is not a type of plain values")
    return dtype


def _is_bytes(content: Any) -> bool:
    # A tensor that repeats its values could be far larger than its file.
    return (
        isinstance(content, torch.Tensor)
        and content.dtype is torch.uint8
        and content.layout is torch.strided
        and not content.is_meta
        and content.is_contiguous()
    )


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, np.bool_ | np.number) else value
