"""Values of the standard library in state files: which are read back as themselves, and how they are written."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
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
    # What a defaultdict makes of a missing key. A tuple made by a call could be nested without a limit.
    **{f"builtins.{kind.__name__}": kind for kind in (bool, dict, float, int, list, str)},
    **_find_path_classes(),
}


def _reduce_as_call(value: Any) -> Any:
    """Return one call that makes a value which torch's reader could not fill; otherwise NotImplemented."""
    if type(value) is collections.deque:
        return collections.deque, (list(value), value.maxlen)
    if type(value) is collections.defaultdict:
        return collections.defaultdict, (value.default_factory, dict(value))
    if type(value) is zoneinfo.ZoneInfo and value.key is not None:
        return zoneinfo.ZoneInfo, (value.key,)
    return NotImplemented


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
_FACTORIES = {f"builtins.{kind.__name__}": kind for kind in (bool, dict, float, int, list, set, str)}


def describe(value: Any) -> dict[str, Any] | None:
    """Return a value of these types as a dict of plain values, for :func:`rebuild`; None for any other value."""
    name = _NAMES.get(type(value))
    if name is None:
        return None
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return {_TYPE: name, _ARGUMENTS: [], _ATTRIBUTES: dict(vars(value))}
    call = (None, (str(value),)) if isinstance(value, uuid.UUID) else _reduce_as_call(value)
    arguments = list((value.__reduce_ex__(2) if call is NotImplemented else call)[1])
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
    name, arguments = described[_TYPE], list(described[_ARGUMENTS])
    if name == "collections.defaultdict" and arguments[0] is not None:
        arguments[0] = _FACTORIES[arguments[0]]
    value = CONSTRUCTORS[name](*arguments)
    if described[_ATTRIBUTES]:
        vars(value).update(described[_ATTRIBUTES])
    return value


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return _reduce_as_call(value)


class _PickleModule:
    Pickler = _Pickler


def save_state(value: Any, file: pathlib.Path) -> None:
    """Write a state file with ``torch.save``, so that torch's restricted reader and Determined read it."""
    torch.save(value, file, pickle_module=_PickleModule)
