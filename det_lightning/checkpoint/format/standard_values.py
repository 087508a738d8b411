"""How state files are written, and which values of numpy and the standard library they may hold."""

from __future__ import annotations

import argparse
import collections
import copy
import copyreg
import datetime
import decimal
import fractions
import functools
import math
import pathlib
import pickle
import types
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from det_lightning import errors
from det_lightning.masking import short_text

# The keys of a dict that describes a value of the standard library, in files for any program.
_TYPE = "standard_type"
_ARGUMENTS = "standard_arguments"
_ATTRIBUTES = "standard_attributes"
# The keys of a dict that describes a numpy array or scalar.
_NUMPY_TYPE = "numpy_dtype"
_NUMPY_SHAPE = "numpy_shape"
_NUMPY_CONTENT = "numpy_content"

# Booleans, integers, floats, complex numbers, bytes, strings, times: none refers to Python objects.
_PLAIN_KINDS = "biufcSUmM"
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)

#: Return the names of the attributes that objects of a class have in slots, as pickle itself finds them.
list_slots: Callable[[type], list[str]] = functools.cache(copyreg._slotnames)  # type: ignore[attr-defined]


def _checking(kind: Any) -> Callable[..., Any]:
    """Return a constructor of dates or times that checks values in pickled bytes, which Python does not."""
    return lambda *args: kind(*args).replace()


def _find_path_classes() -> dict[str, Any]:
    """Return the path classes by all their names; a path of another operating system becomes a pure path."""
    names = ("PurePosixPath", "PureWindowsPath", "PosixPath", "WindowsPath")
    own = type(pathlib.Path())
    found = {name: getattr(pathlib, name) for name in names}
    for name, kind in found.items():
        if issubclass(kind, pathlib.Path) and kind is not own:
            found[name] = getattr(pathlib, f"Pure{name}")
    # Python 3.13 moved them.
    return {f"{module}.{name}": kind for module in ("pathlib", "pathlib._local") for name, kind in found.items()}


#: The constructors of the standard library that a state file may call, by name, beyond those that torch allows.
CONSTRUCTORS: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "collections.defaultdict": collections.defaultdict,
    "collections.deque": collections.deque,
    **{f"datetime.{kind.__name__}": _checking(kind) for kind in (datetime.datetime, datetime.date, datetime.time)},
    "datetime.timedelta": datetime.timedelta,
    "datetime.timezone": datetime.timezone,
    "decimal.Decimal": decimal.Decimal,
    "fractions.Fraction": fractions.Fraction,
    "types.SimpleNamespace": types.SimpleNamespace,
    "uuid.UUID": uuid.UUID,
    "zoneinfo.ZoneInfo": zoneinfo.ZoneInfo,
    **{f"builtins.{kind.__name__}": kind for kind in (frozenset, range, slice)},
    # A defaultdict makes these of a missing key.
    **{f"builtins.{kind.__name__}": kind for kind in (bool, dict, float, int, list, str)},
    **_find_path_classes(),
}


# Pickled as one call with plain arguments: torch's reader cannot fill these types, nor look up their functions.
_AS_CALLS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    collections.deque: lambda value: (collections.deque, (list(value), value.maxlen)),
    collections.defaultdict: lambda value: (collections.defaultdict, (value.default_factory, dict(value))),
    zoneinfo.ZoneInfo: lambda value: (zoneinfo.ZoneInfo, (value.key,)),
}


# The names of the types that become descriptions.
_NAMES = {
    type(pathlib.Path()) if kind is pathlib.Path else kind: name
    for name, kind in {
        **{name: kind for name, kind in CONSTRUCTORS.items() if isinstance(kind, type)},
        "datetime.datetime": datetime.datetime,
        "datetime.date": datetime.date,
        "datetime.time": datetime.time,
    }.items()
    if kind not in (bool, dict, float, int, list, str)
}
_DESCRIBED_AS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    **_AS_CALLS,
    uuid.UUID: lambda value: (uuid.UUID, (str(value),)),
}
_FACTORIES = {f"builtins.{kind.__name__}": kind for kind in (bool, dict, float, int, list, set, str)}


# How to pickle the types above; the global table applies to all others.
_TABLE: Any = collections.ChainMap(_AS_CALLS, copyreg.dispatch_table)


class _PickleModule:
    class Pickler(pickle.Pickler):
        dispatch_table = _TABLE


#: Write a state file: ``torch.save`` in a form that torch's restricted reader and Determined both read.
save_state = functools.partial(torch.save, pickle_module=_PickleModule)


class _Call(list[Any]):
    """A function and its arguments, pickled as the call that makes a value."""

    def __reduce__(self) -> Any:
        return tuple(self)


def with_calls(value: Any) -> Any:
    """Return a copy of ``value`` that any pickler writes in the form of :data:`save_state`."""
    done: dict[int, Any] = {}
    kept: list[Any] = []  # so that ids are not reused

    def replace(one: Any) -> Any:
        reduce = _AS_CALLS.get(type(one))
        if reduce is not None and id(one) not in done:
            kept.append(reduce(one))
            done[id(one)] = call = _Call()  # in case the value holds itself
            call += _replace_values(kept[-1], replace, done)
        return one if reduce is None else done[id(one)]

    return _replace_values(value, replace, done)


def with_plain_values(value: Any) -> Any:
    """Return a copy of ``value`` in which plain dicts describe the values of numpy and the standard library.

    Only dicts, lists and tuples are searched. Arrays of Python objects or of records stay as they are.
    """
    return _replace_values(value, _describe, {})


def with_own_types(value: Any) -> Any:
    """Reverse :func:`with_plain_values`; raise an ``InvalidCheckpointException`` if a value is damaged."""
    return _replace_values(value, _rebuild, {})


def with_plain_numbers(value: Any) -> Any:
    """Return ``value`` with Python numbers in place of numpy scalars, in dicts, lists and tuples."""
    return _replace_values(value, lambda one: one.item() if isinstance(one, np.bool_ | np.number) else one, {})


def _replace_values(value: Any, replace: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """Replace values in nested containers. A container without a replaced value stays the same object."""
    found = replace(value)
    if found is not value or type(value) not in (*_MAPPINGS, list, tuple):
        return found
    if id(value) in done:
        return done[id(value)]
    done[id(value)] = value  # in case the container holds itself
    parts = list(value.values()) if isinstance(value, dict) else value
    replaced = [_replace_values(part, replace, done) for part in parts]
    if any(one is not before for one, before in zip(replaced, parts, strict=True)):
        if isinstance(value, dict):
            done[id(value)] = copy.copy(value)  # keeps the versions of modules that torch attaches to a state dict
            done[id(value)].update(zip(value, replaced, strict=True))
        else:
            done[id(value)] = type(value)(replaced)
    return done[id(value)]


def _describe(value: Any) -> Any:
    if type(value) in _NAMES:
        return _describe_standard(value)
    is_array = isinstance(value, np.ndarray)
    if not (is_array or isinstance(value, np.generic)) or value.dtype.kind not in _PLAIN_KINDS:
        return value
    if not value.itemsize:
        return value
    return {
        _NUMPY_TYPE: value.dtype.str,
        _NUMPY_SHAPE: list(value.shape) if is_array else None,
        _NUMPY_CONTENT: torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy()),
    }


def _describe_standard(value: Any) -> Any:
    """Describe a value of the standard library by a dict; return the value itself if its factory has no name."""
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        arguments: list[Any] = []
        attributes = dict(vars(value))
    else:
        reduce = _DESCRIBED_AS.get(type(value))
        arguments = list((value.__reduce_ex__(2) if reduce is None else reduce(value))[1])
        attributes = {}
    if isinstance(value, collections.defaultdict) and value.default_factory is not None:
        names = [name for name, factory in _FACTORIES.items() if factory is value.default_factory]
        if not names:
            return value
        arguments[0] = names[0]
    described = {_TYPE: _NAMES[type(value)], _ARGUMENTS: arguments, _ATTRIBUTES: attributes}
    return {name: _replace_values(part, _describe, {}) for name, part in described.items()}


def _rebuild(value: Any) -> Any:
    """Return the described value."""
    if type(value) is not dict:
        return value
    try:
        if value.keys() == {_TYPE, _ARGUMENTS, _ATTRIBUTES}:
            parts = {name: _replace_values(part, _rebuild, {}) for name, part in value.items()}
            return _rebuild_standard(parts[_TYPE], list(parts[_ARGUMENTS]), parts[_ATTRIBUTES])
        if value.keys() == {_NUMPY_TYPE, _NUMPY_SHAPE, _NUMPY_CONTENT}:
            return _rebuild_array(value[_NUMPY_TYPE], value[_NUMPY_SHAPE], value[_NUMPY_CONTENT])
    except errors.InvalidCheckpointException:
        raise
    except Exception as e:  # constructors raise errors of many kinds
        raise errors.InvalidCheckpointException(
            f"The checkpoint is damaged: the value {short_text(value)} cannot be restored: {e}."
        ) from e
    return value


def _rebuild_standard(name: str, arguments: list[Any], attributes: dict[str, Any]) -> Any:
    if name == "collections.defaultdict" and arguments[0] is not None:
        arguments[0] = _FACTORIES[arguments[0]]
    value = CONSTRUCTORS[name](*arguments)
    if attributes:
        vars(value).update(attributes)
    return value


def _rebuild_array(name: str, shape: list[int] | None, content: torch.Tensor) -> Any:
    dtype = np.dtype(name)
    if dtype.kind not in _PLAIN_KINDS:
        raise ValueError(f"{name!r:.50} is not a type of plain values")
    flat = np.frombuffer(bytearray(content.cpu().numpy().tobytes()), dtype)
    if flat.size != math.prod(shape or ()):
        raise ValueError("the content does not fit the shape")
    return flat[0] if shape is None else flat.reshape(shape)
