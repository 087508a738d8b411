"""An interpreter of pickles that builds descriptions in place of the values that a pickle asks for.

The operations are those of protocol 2, which ``torch.save`` uses; see the standard library's ``pickletools``.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import torch

from det_lightning.checkpoint.safe_load.descriptions import (
    BYTES_OF_VALUE,
    CheckedElsewhere,
    CostlyError,
    DescribedDict,
    DescribedStorage,
    LongText,
    NamedGlobal,
    is_count,
    require_fast_keys,
    require_key,
    shown,
    weight,
)
from det_lightning.checkpoint.safe_load.stand_ins import DataType

# Longer texts are not decoded; only their length is checked.
_SHORT_TEXT_BYTES = 4096
# As many containers may be begun inside one another.
_MAX_MARKS = 1000
# What calls may copy: so many bytes, and a multiple of those in the file.
_ROOM = 2**26
_ROOM_PER_BYTE = 8

# Classes of storages, and the bytes of one element.
_ITEMSIZES = {
    1: ("Char", "Byte", "Bool", "QUInt8", "QInt8", "QUInt4x2", "QUInt2x4"),
    2: ("Half", "BFloat16", "Short"),
    4: ("Float", "Int", "QInt32"),
    8: ("Double", "Long", "ComplexFloat"),
    16: ("ComplexDouble",),
}
STORAGES = {f"torch.{kind}Storage": size for size, kinds in _ITEMSIZES.items() for kind in kinds}
STORAGES["torch.storage.UntypedStorage"] = 1


class Interpreter:
    """Interprets the pickle at the current position of ``file``; at most ``size`` bytes are left there.

    The pickle may call ``safe_names`` with any arguments; ``calls`` check the arguments and describe the result;
    ``names`` may only be named. ``claim`` returns whether there is a storage with a key and a size. The names
    to which the pickle has referred are ``named``.

    A value can be an argument of any number of calls, which each copy it; together they may copy only so much.
    """

    def __init__(
        self,
        file: IO[bytes],
        size: int,
        claim: Callable[[Any, int], bool] | None = None,
        safe_names: frozenset[str] = frozenset(),
        calls: Mapping[str, Callable[..., Any]] | None = None,
        names: frozenset[str] = frozenset(),
    ) -> None:
        self._file = file
        self._size = size
        self._claim = claim
        self.safe_names = safe_names
        self._calls = calls or {}
        self._names = names | STORAGES.keys()
        self._storages: dict[Any, DescribedStorage] = {}
        self.stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.named: set[str] = set()
        self._dicts: list[DescribedDict] = []
        self._room = _ROOM + _ROOM_PER_BYTE * size

    def run(self) -> Any:
        """Return the description of the pickled value."""
        while True:
            code = self.read(1)
            if code == pickle.STOP:
                if len(self.stack) != 1 or self._outer:
                    raise ValueError("it holds more than one value")
                for described in self._dicts:
                    require_fast_keys(described.items[::2])
                return self.stack.pop()
            step = _STEPS.get(code)
            if step is None:
                raise ValueError(f"torch.save does not write the pickle operation {code!r}")
            step(self)

    def read(self, count: int) -> bytes:
        content = self._file.read(count) if count <= self._size else b""
        if len(content) < count:
            raise EOFError("it ends in the middle of a value")
        return content

    def _read_line(self) -> str:
        line = self._file.readline(_SHORT_TEXT_BYTES)
        if not line.endswith(b"\n"):
            raise ValueError("a name has no end")
        return line[:-1].decode("utf-8")

    # Values without parts

    def integer(self, layout: str) -> int:
        number: int = struct.unpack(layout, self.read(struct.calcsize(layout)))[0]
        return number

    def text(self, count: int) -> None:
        content = self.read(count)
        is_short = count <= _SHORT_TEXT_BYTES
        self.stack.append(content.decode("utf-8", "surrogatepass") if is_short else LongText(count))

    def push_name(self) -> None:
        module = self._read_line()
        name = self._read_line()
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        known = full in self._calls or full in self._names or is_dtype
        if not known and full not in self.safe_names:
            # The wording is torch's, which the caller parses.
            raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {full.removeprefix('builtins.')}")
        self.named.add(full)
        self.stack.append(NamedGlobal(full))

    # Containers

    def empty_dict(self) -> None:
        self._dicts.append(DescribedDict())
        self.stack.append(self._dicts[-1])

    def mark(self) -> None:
        if len(self._outer) > _MAX_MARKS:
            raise CostlyError("its values are nested too deeply")
        self._outer.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self._outer.pop()
        return items

    def marked_tuple(self) -> None:
        items = tuple(self.pop_mark())
        self.stack.append(items)

    def tuple(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError("too few values")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError(f"{shown(target)} is not a list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, DescribedDict) or len(items) % 2:
            raise ValueError(f"{shown(target)} is not a dict, or a key has no value")
        for key in items[::2]:
            require_key(key)
        target.items += items

    # Calls

    def reduce(self) -> None:
        args = self.stack.pop()
        function = self.stack.pop()
        self.stack.append(self.call(function, args))

    def call(self, function: Any, args: Any) -> Any:
        if not isinstance(function, NamedGlobal) or type(args) is not tuple:
            raise ValueError(f"{shown(function)} cannot be called with {shown(args)}")
        self._charge_all(args)
        if function.full in self.safe_names:
            return CheckedElsewhere()
        check = self._calls.get(function.full)
        if check is None:
            raise ValueError(f"torch.save does not write a call of {function.full}")
        described = check(self, *args)
        if isinstance(described, DescribedDict):
            self._dicts.append(described)
        return described

    def charge(self, size: int) -> None:
        """Raise if calls copy more than a file of this size can be meant to hold."""
        self._room -= size
        if self._room < 0:
            raise CostlyError("it asks for copies of the same values too often")

    def _charge_all(self, values: Sequence[Any]) -> None:
        self.charge(BYTES_OF_VALUE * len(values))  # first, because they may be many
        self.charge(sum(map(weight, values)))

    def new(self) -> None:
        _args = self.stack.pop()
        kind = self.stack.pop()
        if not isinstance(kind, NamedGlobal):
            raise ValueError(f"{shown(kind)} is not a class")
        if kind.full not in self.safe_names:
            raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {kind.full}")
        self.stack.append(CheckedElsewhere())

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, DataType):
            target.__setstate__(state)
            return
        if isinstance(target, CheckedElsewhere):
            self._charge_all(state if type(state) is tuple else (state,))
            return
        if not isinstance(target, DescribedDict) or not target.ordered or not isinstance(state, DescribedDict):
            raise ValueError(f"torch.save does not write attributes of {shown(target)}")
        self.charge(BYTES_OF_VALUE * len(state.items))
        names = state.items[::2]
        # An attribute with the name of a method would hide it.
        wrong = [name for name in names if not isinstance(name, str) or hasattr(OrderedDict, name)]
        if wrong:
            raise ValueError(f"an OrderedDict can have no attribute {shown(wrong[0])}")
        target.attributes += state.items[1::2]

    # Storages

    def stored(self) -> None:
        saved = self.stack.pop()
        if type(saved) is not tuple or len(saved) not in (5, 6) or saved[0] != "storage" or self._claim is None:
            raise ValueError(f"{shown(saved)} is not a reference to a storage")
        _, kind, key, location, numel, *view = saved
        itemsize = STORAGES.get(kind.full) if isinstance(kind, NamedGlobal) else None
        if itemsize is None or not isinstance(key, str) or not isinstance(location, str) or not is_count(numel):
            raise ValueError("a reference to a storage has other parts")
        storage = self._find_storage(key, itemsize, numel)
        if view and view[0] is not None:
            storage = self._find_view(storage, view[0])
        self.stack.append(storage)

    def _find_storage(self, key: str, itemsize: int, numel: int) -> DescribedStorage:
        assert self._claim is not None
        found = self._storages.get(key)
        if found is None:
            if not self._claim(key, numel * itemsize):
                raise ValueError(
                    f"the storage {key!r:.100} should have {numel * itemsize:,} bytes, which are not there"
                )
            self._room += _ROOM_PER_BYTE * numel * itemsize
            found = self._storages[key] = DescribedStorage(itemsize, numel * itemsize)
        if (found.itemsize, found.nbytes) != (itemsize, numel * itemsize):
            raise ValueError(f"the storage {key!r:.100} has two sizes")
        return found

    def _find_view(self, storage: DescribedStorage, view: Any) -> DescribedStorage:
        if type(view) is not tuple or len(view) != 3 or not isinstance(view[0], str) or view[0] in self._storages:
            raise ValueError("a reference to a part of a storage has other parts")
        _, offset, numel = view
        if not is_count(offset) or not is_count(numel) or (offset + numel) * storage.itemsize > storage.nbytes:
            raise ValueError("a part of a storage lies outside of it")
        return DescribedStorage(storage.itemsize, numel * storage.itemsize)


_STEPS: dict[bytes, Callable[[Interpreter], Any]] = {
    pickle.PROTO: lambda s: s.read(1),
    pickle.NONE: lambda s: s.stack.append(None),
    pickle.NEWTRUE: lambda s: s.stack.append(True),
    pickle.NEWFALSE: lambda s: s.stack.append(False),
    pickle.BININT: lambda s: s.stack.append(s.integer("<i")),
    pickle.BININT1: lambda s: s.stack.append(s.integer("<B")),
    pickle.BININT2: lambda s: s.stack.append(s.integer("<H")),
    pickle.BINFLOAT: lambda s: s.stack.append(struct.unpack(">d", s.read(8))[0]),
    pickle.LONG1: lambda s: s.stack.append(int.from_bytes(s.read(s.integer("<B")), "little", signed=True)),
    pickle.BINUNICODE: lambda s: s.text(s.integer("<I")),
    pickle.SHORT_BINSTRING: lambda s: s.stack.append(s.read(s.integer("<B")).decode("latin-1")),
    pickle.GLOBAL: Interpreter.push_name,
    pickle.EMPTY_TUPLE: lambda s: s.stack.append(()),
    pickle.EMPTY_LIST: lambda s: s.stack.append([]),
    pickle.EMPTY_DICT: Interpreter.empty_dict,
    pickle.EMPTY_SET: lambda s: s.stack.append(CheckedElsewhere()),
    pickle.MARK: Interpreter.mark,
    pickle.TUPLE: Interpreter.marked_tuple,
    pickle.TUPLE1: lambda s: s.tuple(1),
    pickle.TUPLE2: lambda s: s.tuple(2),
    pickle.TUPLE3: lambda s: s.tuple(3),
    pickle.APPEND: lambda s: s.extend([s.stack.pop()]),
    pickle.APPENDS: lambda s: s.extend(s.pop_mark()),
    pickle.SETITEM: lambda s: s.set_items([s.stack.pop(-2), s.stack.pop()]),
    pickle.SETITEMS: lambda s: s.set_items(s.pop_mark()),
    pickle.BINPUT: lambda s: s.memo.__setitem__(s.integer("<B"), s.stack[-1]),
    pickle.LONG_BINPUT: lambda s: s.memo.__setitem__(s.integer("<I"), s.stack[-1]),
    pickle.BINGET: lambda s: s.stack.append(s.memo[s.integer("<B")]),
    pickle.LONG_BINGET: lambda s: s.stack.append(s.memo[s.integer("<I")]),
    pickle.REDUCE: Interpreter.reduce,
    pickle.NEWOBJ: Interpreter.new,
    pickle.BUILD: Interpreter.build,
    pickle.BINPERSID: Interpreter.stored,
}
