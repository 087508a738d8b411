"""Values of the standard library in state files: which are read back as themselves, and how they are written."""

from __future__ import annotations

import argparse
import collections
import copyreg
import datetime
import decimal
import fractions
import functools
import pathlib
import pickle
import types
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import torch

# A dict with these keys takes the place of a value in files that any program reads.
_TYPE = "standard_type"
_ARGUMENTS = "standard_arguments"
_ATTRIBUTES = "standard_attributes"


def _checking(kind: Any) -> Callable[..., Any]:
    """Return a function that makes a date or time of pickled bytes, whose values Python does not check."""
    return lambda *args: kind(*args).replace()


def _find_path_classes() -> dict[str, Any]:
    """Return the classes of paths by all their names; a path of another system becomes a pure one."""
    names = ("PurePosixPath", "PureWindowsPath", "PosixPath", "WindowsPath")
    own = type(pathlib.Path())
    found = {name: getattr(pathlib, name) for name in names}
    for name, kind in found.items():
        if issubclass(kind, pathlib.Path) and kind is not own:
            found[name] = getattr(pathlib, f"Pure{name}")
    # Python 3.13 moved them.
    return {f"{module}.{name}": kind for module in ("pathlib", "pathlib._local") for name, kind in found.items()}


#: What a state file may call of the standard library, by the names in a pickle, beyond what torch allows anyway.
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


# As one call with plain arguments, since torch's reader cannot fill these types, nor look up their functions.
_AS_CALLS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    collections.deque: lambda value: (collections.deque, (list(value), value.maxlen)),
    collections.defaultdict: lambda value: (collections.defaultdict, (value.default_factory, dict(value))),
    zoneinfo.ZoneInfo: lambda value: (zoneinfo.ZoneInfo, (value.key,)),
}


# The types of the values that are described, and their names.
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


def describe(value: Any) -> dict[str, Any] | None:
    """Return a value of these types as a dict of plain values, for :func:`rebuild`; None for any other value."""
    name = _NAMES.get(type(value))
    if name is None:
        return None
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return {_TYPE: name, _ARGUMENTS: [], _ATTRIBUTES: dict(vars(value))}
    reduce = _DESCRIBED_AS.get(type(value))
    arguments = list((value.__reduce_ex__(2) if reduce is None else reduce(value))[1])
    if isinstance(value, collections.defaultdict) and value.default_factory is not None:
        names = [one for one, factory in _FACTORIES.items() if factory is value.default_factory]
        if not names:
            return None
        arguments[0] = names[0]
    return {_TYPE: name, _ARGUMENTS: arguments, _ATTRIBUTES: {}}


def is_description(value: dict[Any, Any]) -> bool:
    """Return whether :func:`describe` can have made a dict."""
    return value.keys() == {_TYPE, _ARGUMENTS, _ATTRIBUTES}


def rebuild(described: dict[str, Any]) -> Any:
    """Return the value that :func:`describe` described; raise an error of any kind if that is not possible."""
    name = described[_TYPE]
    arguments = list(described[_ARGUMENTS])
    if name == "collections.defaultdict" and arguments[0] is not None:
        arguments[0] = _FACTORIES[arguments[0]]
    value = CONSTRUCTORS[name](*arguments)
    if described[_ATTRIBUTES]:
        vars(value).update(described[_ATTRIBUTES])
    return value


class _Table(dict[type, Any]):
    """How to pickle these types; then, what anybody has registered for others."""

    __missing__ = copyreg.dispatch_table.__getitem__


class _StatePickler(pickle.Pickler):
    dispatch_table = _Table(_AS_CALLS)


class _PickleModule:
    Pickler = _StatePickler


#: Write a state file: ``torch.save``, so that torch's restricted reader and Determined read all of these values.
save_state = functools.partial(torch.save, pickle_module=_PickleModule)
