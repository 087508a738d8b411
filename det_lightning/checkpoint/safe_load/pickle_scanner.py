"""Checks a pickle of ``torch.save`` before torch reads it: names on our list, storages that exist, depth.

torch's reader calls everything on torch's list or the user's; our list is shorter. Two more things in a pickle could
end the process: deep nesting, since hashing and freeing a value descend without a limit, and, before torch 2.13, a
storage larger than the content.

For weights with objects besides, a pickle is rewritten: placeholders take the objects' places. A placeholder takes any
arguments, state and items, keeps nothing, and calls nothing. Small pickles of plain values are read here too.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
import pathlib
import pickle
import pickletools
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import IO, Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.layout import read_bytes
from det_lightning.checkpoint.format.standard_values import list_slots
from det_lightning.checkpoint.safe_load.safe_globals import (
    ALLOWED,
    CHECK_STATE,
    RANDOM_STATES,
    STORAGES,
    TAKE_ATTRIBUTES,
    find_declared,
    finish,
)

# What torch's reader knows beyond the operations in `PickleScanner`. Others name values in ways it cannot follow.
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_CONTAINERS = {"EMPTY_TUPLE": "tuple", "EMPTY_LIST": "list", "EMPTY_DICT": "dict", "EMPTY_SET": "set"}
_ATOMS = frozenset(["BINUNICODE", "SHORT_BINSTRING", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"])
_FETCHES = frozenset(["BINGET", "LONG_BINGET"])
_CALLS = frozenset(["REDUCE", "NEWOBJ"])
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_FILLS = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
_LISTS = frozenset(["list"])
_DICTS = frozenset(["dict", "collections.OrderedDict", "collections.Counter"])
_TAKE_ITEMS = {"APPEND": _LISTS, "APPENDS": _LISTS, "SETITEM": _DICTS, "SETITEMS": _DICTS}
# Operations that give items to a container. torch's reader fills plain containers only; a placeholder gets the items as
# a state, in a tuple.
_ITEMS_AS_STATE = {
    "APPEND": pickle.BUILD,
    "APPENDS": pickle.TUPLE + pickle.BUILD,
    "SETITEM": pickle.TUPLE2 + pickle.BUILD,
    "SETITEMS": pickle.TUPLE + pickle.BUILD,
}
# How the name begins that these functions take as their first argument. One calls it and sets any attributes.
_FIRST_ARGUMENTS = {
    "torch._tensor._rebuild_from_type_v2": "torch._utils._rebuild_",
    "builtins.getattr": "torch.optim.",
}

# Containers and calls alike. States of training nest less than 20 deep.
_MAX_DEPTH = 150
# A key is a name or a tuple of a few. However often tuples share their parts, hashing looks at each part again.
_MORE_PARTS = 1_000_000
_PARTS_PER_BYTE = 16

#: Return whether there is a storage with a key and a size in bytes.
Claim = Callable[[tuple[str, int]], bool]


class UnsafeReference(pickle.UnpicklingError):
    """A pickle refers to a forbidden name. The name is the only argument of the error."""


@dataclasses.dataclass(frozen=True)
class _Name:
    """A class, function or constant that a pickle names."""

    full: str


@dataclasses.dataclass(eq=False, slots=True)
class _Value:
    """A container, a storage, or the result of a call.

    Attributes:
        kind: the type of a container, or the full name of the called function.
        values: the values in a tuple.
        depth: the levels of nesting inside.
        parts: the number of parts that a hash of the value looks at.
    """

    kind: str
    values: Sequence[Any] = ()
    depth: int = 1
    parts: int = 1


def scan_pickle(file: IO[bytes], size: int, claim: Claim = lambda stored: False) -> list[str]:
    """Check the pickle at the current position of a file of ``size`` bytes; return the texts in the pickle.

    Raise an ``UnsafeReference`` for a forbidden name, an ``UnpicklingError`` for operations that torch does not read,
    and a ``ValueError`` if ``claim`` denies a storage or values are nested too deeply.
    """
    scanner = PickleScanner(size, claim)
    try:
        for operation, argument, _ in pickletools.genops(file):
            scanner.step(operation.name, argument)
    except UnicodeDecodeError as e:  # a name that pickletools does not read, and nothing allowed has
        raise UnsafeReference(e.object.decode("utf-8", "replace")) from e
    return scanner.texts


class Placeholder:
    """Takes the place of an object that is not read."""

    def __new__(cls, *_: Any) -> Placeholder:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def put_placeholders(pickled: bytes, kept: Container[str]) -> bytes:
    """Return a pickle that refers to :class:`Placeholder` in place of each name not ``kept``, nor declared."""
    name = f"{__name__}.{Placeholder.__qualname__}"
    reference = pickle.GLOBAL + f"{__name__}\n{Placeholder.__qualname__}\n".encode()
    scanner = PickleScanner(len(pickled), lambda stored: True, kept, name)
    file = io.BytesIO(pickled)
    parts = []
    begin = 0
    is_dropped = False
    for operation, argument, position in pickletools.genops(file):
        step = operation.name
        gets_state = step in _CALLS and scanner.has_placeholder(-2)
        replacement = pickle.BUILD if gets_state else None
        scanner.step("BUILD" if gets_state else step, argument)
        if is_dropped:
            # An object within itself is made twice, and the inner one fetched. Either placeholder will do.
            if step not in _FETCHES or not scanner.has_placeholder(-1):
                raise pickle.UnpicklingError("an object is dropped")
            is_dropped = False
            replacement = b""
        elif step == "POP":
            is_dropped = True
            replacement = b""
        elif step == "GLOBAL" and scanner.names_placeholder():
            replacement = reference
        elif step in _ITEMS_AS_STATE and scanner.has_placeholder(-1):
            replacement = _ITEMS_AS_STATE[step]
        if replacement is not None:
            parts += [pickled[begin:position], replacement]
            begin = file.tell()
    return b"".join([*parts, pickled[begin:]])


class PickleScanner:
    """Follows the stack of torch's reader, with text, numbers, names, and descriptions of all other values.

    With a ``placeholder``, the name of a class, names that are not ``allowed`` become this name.
    """

    def __init__(
        self, size: int, claim: Claim, allowed: Container[str] = ALLOWED, placeholder: str | None = None
    ) -> None:
        self._most_parts = _PARTS_PER_BYTE * size + _MORE_PARTS
        self._claim = claim
        self._allowed = allowed
        self._placeholder = placeholder
        self._declared = find_declared()
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self.texts: list[str] = []

    def names_placeholder(self) -> bool:
        """Return whether the top of the stack is the class ``placeholder``."""
        return bool(self._stack[-1] == _Name(self._placeholder or ""))

    def has_placeholder(self, index: int) -> bool:
        """Return whether there is a placeholder at an index of the stack."""
        value = self._stack[index]
        return isinstance(value, _Value) and value.kind == self._placeholder

    def step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in _FETCHES:
            stack.append(self._memo[argument])
        elif name in _ATOMS:
            if name == "SHORT_BINSTRING" and not argument.isascii():
                argument = argument.encode("latin-1")  # which text torch makes of the bytes depends on its arguments
            stack.append(argument)
            if isinstance(argument, str):
                self.texts.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _CONTAINERS:
            stack.append(_Value(_CONTAINERS[name]))
        elif name == "MARK":
            self._outer.append(stack)
            self._stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            self._stack = self._outer.pop()
            if name == "TUPLE":
                self._stack.append(self._gather(stack))
            else:
                self._fill(name, stack)
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [self._gather(stack[-_TUPLES[name] :])]
        elif name in _FILLS:
            values = stack[-_FILLS[name] :]
            del stack[-_FILLS[name] :]
            self._fill(name, values)
        else:
            self._step_seldom(name, argument)

    def _step_seldom(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name == "GLOBAL":
            stack.append(self._find(*argument.split(" ", 1)))
        elif name in _CALLS:
            args = stack.pop()
            stack[-1] = _call(stack[-1], args)
        elif name == "POP" and self.has_placeholder(-1):
            stack.pop()
        elif name == "BINPERSID":
            self._require_storage(stack.pop())
            stack.append(_Value("storage"))
        elif name not in ("PROTO", "STOP"):
            what = "an integer of more than 255 bytes" if name == "LONG4" else f"the pickle operation {name}"
            raise pickle.UnpicklingError(f"{what}, which torch's restricted reader does not know")

    def _find(self, module: str, name: str) -> _Name:
        full = _spell_name(module, name)
        if full in self._allowed or full in self._declared:
            return _Name(full)
        if self._placeholder is None:
            raise UnsafeReference(full.removeprefix("builtins."))
        return _Name(self._placeholder)

    def _gather(self, values: list[Any]) -> _Value:
        parts = 1 + len(values) + sum(value.parts for value in values if isinstance(value, _Value))
        if parts > self._most_parts:
            raise ValueError("its tuples share too many parts")
        return _Value("tuple", values, _find_depth(values), parts)

    def _fill(self, name: str, values: list[Any]) -> None:
        """Add items or a state to the value on top of the stack; raise if a value of its kind takes none."""
        filled = self._stack[-1]
        kind = filled.kind if isinstance(filled, _Value) else type(filled).__name__
        if name == "BUILD":
            # Any other state of an object could set whatever its class defines.
            is_dict = isinstance(values[0], _Value) and values[0].kind == "dict"
            takes = kind in CHECK_STATE or (is_dict and kind in TAKE_ATTRIBUTES)
        else:
            takes = kind in _TAKE_ITEMS[name]
        # torch decides about the user's own classes.
        takes = takes or kind == self._placeholder or kind in self._declared
        if not isinstance(filled, _Value) or not takes:
            what = "a state" if name == "BUILD" else "items"
            raise pickle.UnpicklingError(f"a {kind} with {what}, which torch's restricted reader does not fill")
        filled.depth = max(filled.depth, _find_depth(values))

    def _require_storage(self, reference: Any) -> None:
        """Raise unless a reference is to an existing storage; see ``torch.save`` for the form."""
        values = reference.values if isinstance(reference, _Value) else ()
        # The sixth part, before torch 1.6, is None. A view of another storage in its place outlives what it refers to.
        if (
            len(values) < 5
            or values[0] != "storage"
            or not isinstance(values[1], _Name)
            or [*values[5:]] not in ([], [None])
        ):
            raise ValueError("a reference to a storage has unexpected parts")
        _, kind, key, _, numel = values[:5]
        itemsize = STORAGES.get(kind.full)
        if itemsize is None or not isinstance(key, str) or not isinstance(numel, int):
            raise ValueError("a reference to a storage has unexpected parts")
        if not self._claim((key, numel * itemsize)):
            raise ValueError(f"the storage {key!r:.100} must have {numel * itemsize:,} bytes, which are not there")


def _spell_name(module: str, name: str) -> str:
    """Return Python 3's full name for a name in a pickle, by the tables of torch's reader."""
    if (module, name) in torch._utils.NAME_MAPPING:
        return ".".join(torch._utils.NAME_MAPPING[module, name])
    return f"{torch._utils.IMPORT_MAPPING.get(module, module)}.{name}"


def _call(function: Any, args: Any) -> _Value:
    if not isinstance(args, _Value) or args.kind != "tuple" or not isinstance(function, _Name):
        raise pickle.UnpicklingError("a call without a name or without a tuple of arguments")
    first = args.values[0] if args.values else None
    prefix = _FIRST_ARGUMENTS.get(function.full)
    if prefix and not (isinstance(first, _Name) and first.full.startswith(prefix)):
        shown = first.full if isinstance(first, _Name) else f"a {type(first).__name__}"
        raise pickle.UnpicklingError(f"a call of {function.full} with {shown}")
    return _Value(function.full, (), args.depth, args.parts)


def _find_depth(values: list[Any]) -> int:
    """Return the levels of nesting in a container of values; raise if the nesting is too deep."""
    depth = 1 + max((value.depth for value in values if isinstance(value, _Value)), default=0)
    if depth > _MAX_DEPTH:
        raise ValueError(f"its values are nested more than {_MAX_DEPTH} deep")
    return depth


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


# Small pickles of plain values

# A dict of a few numbers has some hundreds of bytes, the states of random generators some thousands.
_MAX_BYTES = 64 * 1024
# With these operations a few bytes describe keys that take years to hash, or whose hashing ends the process.
_NESTING = {"FROZENSET", "ADDITEMS", "DUP"}
# So do many tuples, or tuples that each occur twice; the pickle of random states refers back to a few values.
_TUPLES_IN_SMALL = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_MAX_TUPLES_IN_SMALL = 1000
_REPEATING = {"GET", "BINGET", "LONG_BINGET"}
_MAX_REPEATED = 20


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, known: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._known = known

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in self._known:
            raise UnsafeReference(name)
        found = self._known[name]
        # A file can set attributes of whatever it names: of a function of its own, or of a class, which refuses them.
        return found if isinstance(found, type) else functools.partial(found)


def _require_small(content: bytes) -> None:
    """Raise if loading a pickle could take too much memory or time, or end the process."""
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it has {len(content):,} bytes")
    names = Counter[str]()
    for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
        # The unpickler allocates memory for all memo numbers up to the one used.
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > number:
            raise ValueError(f"it numbers its values up to {argument:,}")
        names[operation.name] += 1
    is_nested = sum(names[name] for name in _TUPLES_IN_SMALL) > _MAX_TUPLES_IN_SMALL or names.keys() & _NESTING
    if is_nested or sum(names[name] for name in _REPEATING) > _MAX_REPEATED:
        raise ValueError("it holds more than numbers and names")


def read_pickle(path: pathlib.Path, *, trusted: bool = False, with_arrays: bool = False) -> dict[str, Any]:
    """Read a pickled dict of containers, numbers and strings; with ``with_arrays`` also of numpy arrays.

    Raises:
        UnsafeCheckpointError: the file refers to anything else, and is not ``trusted``.
        IncompleteCheckpointError: the file is damaged, would take too much memory or time, or holds no dict.
    """
    content = read_bytes(path)
    try:
        if trusted:
            values = pickle.loads(content)
        else:
            _require_small(content)
            values = finish(_Unpickler(content, RANDOM_STATES if with_arrays else {}).load())
    except UnsafeReference as e:
        raise errors.UnsafeCheckpointError(
            f"{path} refers to {e.args[0]:.200}, so reading the file could run code. If you know where "
            "the file comes from, pass trusted=True."
        ) from e
    except Exception as e:  # unpickling damaged bytes may raise anything
        raise errors.IncompleteCheckpointError(f"{path} cannot be read and may be damaged: {e}") from e
    if not isinstance(values, dict):
        raise errors.IncompleteCheckpointError(f"{path} must hold a dict; got a {type(values).__name__}.")
    return values
