"""Converts values of numpy and of the standard library to plain ones, which any ``torch.load`` reads."""

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
from det_lightning.checkpoint.format import standard_values
from det_lightning.masking import short_text

# A dict with these keys takes the place of a numpy array or scalar.
_TYPE = "numpy_dtype"
_SHAPE = "numpy_shape"
_CONTENT = "numpy_content"

# Booleans, integers, floats, complex numbers, bytes, strings, times: none of them refers to Python objects.
_PLAIN_KINDS = "biufcSUmM"
_MAX_TYPE_CHARS = 32
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)


def with_plain_values(value: Any) -> Any:
    """Return ``value``, which stays unchanged, with plain dicts in place of values of numpy and the standard library.

    They are looked for in dicts, lists and tuples. Arrays of Python objects and of records are left as they are.
    """
    return _replaced(value, _describe, {})


def with_own_types(value: Any) -> Any:
    """Reverse :func:`with_plain_values`; raise an ``InvalidCheckpointException`` if a value is damaged."""
    return _replaced(value, functools.partial(_rebuild, set()), {})


def with_plain_numbers(value: Any) -> Any:
    """Return ``value`` with Python's numbers in place of numpy's scalars, in dicts, lists and tuples."""
    return _replaced(value, lambda one: one.item() if isinstance(one, np.bool_ | np.number) else one, {})


def _replaced(value: Any, replace: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """Replace values in nested containers. A container in which nothing is replaced stays the same object."""
    found = replace(value)
    if found is not value or type(value) not in (*_MAPPINGS, list, tuple):
        return found
    if id(value) in done:
        return done[id(value)]
    done[id(value)] = value  # in case it contains itself
    parts = list(value.values()) if isinstance(value, dict) else value
    replaced = [_replaced(part, replace, done) for part in parts]
    if any(one is not before for one, before in zip(replaced, parts, strict=True)):
        if isinstance(value, dict):
            done[id(value)] = copy.copy(value)  # keeps the versions of modules that torch attaches to a state dict
            done[id(value)].update(zip(value, replaced, strict=True))
        else:
            done[id(value)] = type(value)(replaced)
    return done[id(value)]


def _describe(value: Any) -> Any:
    described = standard_values.describe(value)
    if described is not None:
        # The dict itself is new; what it holds may have to be described as well.
        return {name: _replaced(part, _describe, {}) for name, part in described.items()}
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in _PLAIN_KINDS or not value.itemsize:
        return value
    return {
        _TYPE: value.dtype.str,
        _SHAPE: list(value.shape) if isinstance(value, np.ndarray) else None,
        _CONTENT: torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy()),
    }


def _rebuild(used: set[int], value: Any) -> Any:
    """Return the value of a description; the addresses of contents that were ``used`` grow by its own."""
    if type(value) is dict and standard_values.is_description(value):
        return _rebuild_standard(
            {name: _replaced(part, functools.partial(_rebuild, used), {}) for name, part in value.items()}
        )
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


def _rebuild_standard(described: dict[str, Any]) -> Any:
    try:
        return standard_values.rebuild(described)
    except Exception as e:  # constructors raise errors of many kinds
        raise errors.InvalidCheckpointException(
            f"The checkpoint is damaged: it has a value that cannot be made again: {short_text(described)}: {e}."
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
