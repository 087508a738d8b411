"""Looking through the pickles in a file of ``torch.save`` before torch reads them.

``torch.load(weights_only=True)`` runs no foreign code, but it believes what it is told: ``bytearray`` of ten billion, a
sparse tensor whose indices lead out of it, keys that take years to hash. :func:`screen` follows the same pickle with
descriptions in place of values, and lets only pass what ``torch.save`` writes.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pathlib
import pickle
import struct
import zipfile
from collections import Counter
from collections.abc import Callable
from typing import IO, Any

import torch

__all__ = ["ZIP_MAGIC", "screen"]

#: With these bytes a file begins that torch reads as a zip archive.
ZIP_MAGIC = b"PK\x03\x04"
# What torch.save wrote before 1.6 begins with these two pickles.
_OLD_MAGIC = 0x1950A86A20F9469CFC6C
_OLD_PROTOCOL = 1001

# A longer text is not looked at, but for its length.
_SHORT_TEXT_BYTES = 4096
# A key of a dict is a name or number, or a few of them.
_MAX_KEY_PARTS = 256
# Python's integers beyond this have the hashes of smaller ones. Many of one hash make a dict slow.
_MAX_OWN_HASH = 2**61 - 2
_MAX_SAME_HASH = 100
_MAX_NUMEL = 2**60

_STORAGES: dict[str, int] = {
    **{
        f"torch.{kind}Storage": getattr(torch, f"{kind}Storage").dtype.itemsize
        for kind in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
        + ("ComplexDouble", "ComplexFloat", "QUInt8", "QInt8", "QInt32", "QUInt4x2", "QUInt2x4")
    },
    "torch.storage.UntypedStorage": 1,
}
_QSCHEMES = {
    f"torch.per_{rest}"
    for rest in ("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric")
    + ("channel_affine_float_qparams",)
}
_TENSOR_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter")
_LAYOUTS = {"torch.strided": 0, "torch.sparse_coo": 3} | {
    f"torch.sparse_{kind}": 4 for kind in ("csr", "csc", "bsr", "bsc")
}


@dataclasses.dataclass(frozen=True)
class _Name:
    """A class, function or constant that the pickle names."""

    full: str


@dataclasses.dataclass(eq=False)
class _Dict:
    """A dict, as keys and values one after another."""

    items: list[Any] = dataclasses.field(default_factory=list)
    ordered: bool = False


@dataclasses.dataclass(eq=False)
class _Storage:
    itemsize: int
    nbytes: int


class _Tensor:
    """A tensor of any kind."""


class _Other:
    """A value that is checked by those who make it: numpy's, or one of a class that the user declared safe."""


class _Plain:
    """A value without parts that can be a key: bytes, a size, a device, a data type."""


class _Screen:
    """Follows one pickle.

    Args:
        file: where it begins.
        size: bytes that may follow.
        claim: is told the key and the number of bytes of each storage, and says whether there is one.
        believed: names of what may be called with anything.
    """

    def __init__(
        self,
        file: IO[bytes],
        size: int,
        claim: Callable[[Any, int], bool] | None = None,
        believed: frozenset[str] = frozenset(),
    ) -> None:
        self._file = file
        self._size = size
        self._claim = claim
        self._believed = believed
        self._storages: dict[Any, _Storage] = {}
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._large_keys: set[str] = set()
        self._hashes: Counter[int] = Counter()

    def run(self) -> Any:
        """Return what the pickle describes.

        Raises:
            pickle.UnpicklingError: it refers to something that is not known to be safe.
            ValueError, and others: it is no pickle, or not one of ``torch.save``.
        """
        while True:
            code = self._read(1)
            if code == pickle.STOP:
                return self._stack.pop()
            step = _STEPS.get(code)
            if step is None:
                raise ValueError(f"torch.save does not write the pickle operation {code!r}")
            step(self)

    def _read(self, count: int) -> bytes:
        if count > self._size:
            raise EOFError("it ends in the middle of a value")
        content = self._file.read(count)
        if len(content) < count:
            raise EOFError("it ends in the middle of a value")
        return content

    def _read_line(self) -> str:
        line = self._file.readline(_SHORT_TEXT_BYTES)
        if not line.endswith(b"\n"):
            raise ValueError("a name is not ended")
        return line[:-1].decode("utf-8")

    # Values without parts

    def _integer(self, layout: str) -> int:
        number: int = struct.unpack(layout, self._read(struct.calcsize(layout)))[0]
        return number

    def _text(self, count: int) -> None:
        content = self._read(count)
        self._stack.append(content.decode("utf-8", "surrogatepass") if count <= _SHORT_TEXT_BYTES else "(a long text)")

    def _long(self) -> None:
        self._stack.append(int.from_bytes(self._read(self._integer("<B")), "little", signed=True))

    def _old_text(self) -> None:
        self._stack.append(self._read(self._integer("<B")).decode("latin-1"))

    def _name(self) -> None:
        module, name = self._read_line(), self._read_line()
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        known = full in _CALLS or full in _STORAGES or full in _QSCHEMES or full in _TENSOR_CLASSES or is_dtype
        if not known and full not in self._believed:
            # In the words of torch, which the caller understands.
            raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {full.removeprefix('builtins.')}")
        self._stack.append(_Name(full))

    # Containers

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError("too few values")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise ValueError(f"{_shown(target)} is no list")
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, _Dict) or len(items) % 2:
            raise ValueError(f"{_shown(target)} is no dict, or a key has no value")
        for key in items[::2]:
            self._require_key(key)
        target.items += items

    def _require_key(self, key: Any) -> None:
        """Raise unless a key is hashed in no time; a tuple of tuples can take any."""
        pending, parts = [key], 1
        while pending:
            part = pending.pop()
            if type(part) is tuple:
                parts += len(part)
                if parts > _MAX_KEY_PARTS:
                    raise ValueError("a key of a dict has too many parts")
                pending.extend(part)
            elif isinstance(part, int) and abs(part) > _MAX_OWN_HASH:
                self._note_large_key(part)
            elif not isinstance(part, str | int | float | _Plain | _Name | _Other | None):
                raise ValueError(f"{_shown(part)} can not be a key of a dict")

    def _note_large_key(self, key: int) -> None:
        if f"{key:x}" in self._large_keys:
            return
        self._large_keys.add(f"{key:x}")
        self._hashes[hash(key)] += 1
        if self._hashes[hash(key)] > _MAX_SAME_HASH:
            raise ValueError("the keys of a dict are made to be slow")

    # Calls

    def _reduce(self) -> None:
        args = self._stack.pop()
        function = self._stack.pop()
        self._stack.append(self._call(function, args))

    def _call(self, function: Any, args: Any) -> Any:
        if not isinstance(function, _Name) or type(args) is not tuple:
            raise ValueError(f"{_shown(function)} can not be called with {_shown(args)}")
        if function.full in self._believed:
            return _Other()
        check = _CALLS.get(function.full)
        if check is None:
            raise ValueError(f"torch.save does not write a call of {function.full}")
        return check(self, *args)

    def _new(self) -> None:
        _args, kind = self._stack.pop(), self._stack.pop()
        if not isinstance(kind, _Name) or kind.full not in self._believed:
            raise pickle.UnpicklingError(
                f"Can only create new object for classes that are declared safe: {_shown(kind)}"
            )
        self._stack.append(_Other())

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, _Other):
            return
        # A state_dict() has this attribute; another one could stand before a method.
        if not (isinstance(target, _Dict) and target.ordered and isinstance(state, _Dict)) or [
            key for key in state.items[::2] if key != "_metadata"
        ]:
            raise pickle.UnpicklingError(f"Can only build objects that are declared safe: {_shown(target)}")

    # Storages

    def _stored(self) -> None:
        saved = self._stack.pop()
        if type(saved) is not tuple or len(saved) not in (5, 6) or saved[0] != "storage" or self._claim is None:
            raise ValueError(f"{_shown(saved)} is no reference to a storage")
        _, kind, key, location, numel, *view = saved
        itemsize = _STORAGES.get(kind.full) if isinstance(kind, _Name) else None
        if itemsize is None or not isinstance(key, str) or not isinstance(location, str) or not _is_count(numel):
            raise ValueError("a reference to a storage has other parts")
        storage = self._find_storage(key, itemsize, numel)
        if view and view[0] is not None:
            storage = self._find_view(storage, view[0])
        self._stack.append(storage)

    def _find_storage(self, key: str, itemsize: int, numel: int) -> _Storage:
        assert self._claim is not None
        found = self._storages.get(key)
        if found is None:
            if not self._claim(key, numel * itemsize):
                raise ValueError(
                    f"the storage {key!r:.100} should have {numel * itemsize:,} bytes, which are not there"
                )
            found = self._storages[key] = _Storage(itemsize, numel * itemsize)
        if (found.itemsize, found.nbytes) != (itemsize, numel * itemsize):
            raise ValueError(f"the storage {key!r:.100} has two sizes")
        return found

    def _find_view(self, storage: _Storage, view: Any) -> _Storage:
        if type(view) is not tuple or len(view) != 3 or not isinstance(view[0], str) or view[0] in self._storages:
            raise ValueError("a reference to a part of a storage has other parts")
        _, offset, numel = view
        if not _is_count(offset) or not _is_count(numel) or (offset + numel) * storage.itemsize > storage.nbytes:
            raise ValueError("a part of a storage lies outside of it")
        return _Storage(storage.itemsize, numel * storage.itemsize)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMEL


def _shown(value: Any) -> str:
    """Return a short text for a value, which may have any size."""
    if isinstance(value, _Name):
        return value.full
    return f"{value!r:.100}" if isinstance(value, str) else type(value).__name__.strip("_").lower()


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"a call has other arguments than torch.save gives: {what}")


# What may be called. Each function checks the arguments.


def _ordered_dict(screen: _Screen, items: Any = ()) -> _Dict:
    found = _Dict(ordered=True)
    _require(
        isinstance(items, list | tuple) and all(isinstance(i, list | tuple) and len(i) == 2 for i in items), "pairs"
    )
    for key, value in items:
        screen._require_key(key)
        found.items += [key, value]
    return found


def _counter(_screen: _Screen, counts: Any) -> _Dict:
    _require(isinstance(counts, _Dict), "counts")
    return _Dict(list(counts.items))


def _set(screen: _Screen, items: Any) -> _Other:
    _require(type(items) is list, "items of a set")
    for item in items:
        screen._require_key(item)
    return _Other()


def _encode(_screen: _Screen, text: Any, encoding: Any) -> _Plain:
    _require(isinstance(text, str) and encoding in ("latin1", "latin-1"), "text and encoding")
    return _Plain()


def _bytearray(_screen: _Screen, content: Any = "", encoding: Any = "latin-1") -> _Other:
    _require(isinstance(content, str | _Plain) and encoding in ("latin1", "latin-1"), "content")
    return _Other()


def _complex(_screen: _Screen, *parts: Any) -> _Plain:
    _require(len(parts) == 2 and all(isinstance(part, int | float) for part in parts), "real and imaginary part")
    return _Plain()


def _size(_screen: _Screen, lengths: Any) -> tuple[int, ...]:
    _require_counts(lengths, "size")
    found: tuple[int, ...] = lengths
    return found


def _device(_screen: _Screen, kind: Any, index: Any = None) -> _Plain:
    _require(isinstance(kind, str) and (index is None or _is_count(index)), "device")
    return _Plain()


def _layout(_screen: _Screen, name: Any) -> _Name:
    _require(isinstance(name, str) and name in _LAYOUTS, "layout")
    return _Name(name)


def _require_counts(values: Any, what: str) -> None:
    _require(type(values) is tuple and len(values) <= 64 and all(map(_is_count, values)), what)


def _require_inside(storage: Any, offset: Any, size: Any, stride: Any, itemsize: int | None = None) -> None:
    """Raise unless the elements of a tensor lie in its storage."""
    _require(isinstance(storage, _Storage) and _is_count(offset), "storage and offset")
    _require_counts(size, "size")
    _require_counts(stride, "stride")
    _require(len(size) == len(stride) and math.prod(size) < _MAX_NUMEL, "size and stride")
    last = sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if 0 not in size else -1
    _require(
        (offset + last + 1) * (itemsize or storage.itemsize) <= storage.nbytes, "a tensor reaches beyond its storage"
    )


def _require_hooks(requires_grad: Any, hooks: Any) -> None:
    _require(isinstance(requires_grad, bool), "requires_grad")
    _require(hooks is None or (isinstance(hooks, _Dict) and not hooks.items), "hooks")


def _require_flags(metadata: Any) -> None:
    known = isinstance(metadata, _Dict) and all(name in ("conj", "neg") for name in metadata.items[::2])
    _require(metadata is None or (known and all(isinstance(flag, bool) for flag in metadata.items[1::2])), "flags")


def _require_attributes(state: Any) -> None:
    """Raise unless a state adds attributes to a tensor that have no meaning to torch."""
    parts = state if type(state) is tuple else (state,)
    _require(len(parts) <= 2, "state")
    for part in parts:
        _require(part is None or isinstance(part, _Dict), "state")
        names = part.items[::2] if part is not None else []
        _require(all(isinstance(name, str) and not hasattr(torch.nn.Parameter, name) for name in names), "attributes")


def _tensor_v1(_screen: _Screen, storage: Any, offset: Any, size: Any, stride: Any) -> _Tensor:
    _require_inside(storage, offset, size, stride)
    return _Tensor()


def _tensor_v2(
    _screen: _Screen,
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    metadata: Any = None,
) -> _Tensor:
    _require_inside(storage, offset, size, stride)
    _require_hooks(requires_grad, hooks)
    _require_flags(metadata)
    return _Tensor()


def _tensor_v3(
    _screen: _Screen,
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> _Tensor:
    _require_inside(storage, offset, size, stride, _dtype(dtype).itemsize)
    _require_hooks(requires_grad, hooks)
    _require_flags(metadata)
    return _Tensor()


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name.full.removeprefix("torch."), None) if isinstance(name, _Name) else None
    _require(isinstance(found, torch.dtype), "data type")
    assert isinstance(found, torch.dtype)
    return found


def _quantized(
    _screen: _Screen, storage: Any, offset: Any, size: Any, stride: Any, quantizer: Any, requires_grad: Any, hooks: Any
) -> _Tensor:
    _require_inside(storage, offset, size, stride)
    # torch makes an empty tensor of this size first.
    _require(math.prod(size) * storage.itemsize <= storage.nbytes, "a quantized tensor reaches beyond its storage")
    _require_hooks(requires_grad, hooks)
    _require(type(quantizer) is tuple and len(quantizer) in (3, 4) and isinstance(quantizer[0], _Name), "quantizer")
    _require(quantizer[0].full in _QSCHEMES, "quantizer")
    for part in quantizer[1:]:
        numbers = part if type(part) is list else [part]
        _require(all(isinstance(number, int | float | _Tensor) for number in numbers), "quantizer")
    return _Tensor()


def _sparse(_screen: _Screen, layout: Any, data: Any) -> _Tensor:
    """What the indices say is looked at when they are there; see ``safe_values.finish``."""
    parts = _LAYOUTS.get(layout.full, 0) if isinstance(layout, _Name) else 0
    _require(parts > 0 and type(data) is tuple and len(data) in (parts, 4), "layout and parts")
    tensors, size, coalesced = (data[:2], data[2], data[3:]) if parts == 3 else (data[:3], data[3], ())
    _require(all(isinstance(tensor, _Tensor) for tensor in tensors), "indices and values")
    _require_counts(size, "size")
    _require(all(isinstance(flag, bool | None) for flag in coalesced), "coalesced")
    return _Tensor()


def _meta(_screen: _Screen, dtype: Any, size: Any, stride: Any, requires_grad: Any) -> _Tensor:
    _dtype(dtype)
    _require_counts(size, "size")
    _require_counts(stride, "stride")
    _require(len(size) == len(stride) and isinstance(requires_grad, bool), "size and stride")
    return _Tensor()


def _parameter(_screen: _Screen, data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> _Tensor:
    _require(isinstance(data, _Tensor), "tensor")
    _require_hooks(requires_grad, hooks)
    _require_attributes(state)
    return _Tensor()


def _from_type(screen: _Screen, function: Any, kind: Any, args: Any, state: Any) -> Any:
    _require(isinstance(kind, _Name) and (kind.full in _TENSOR_CLASSES or kind.full in screen._believed), "class")
    made = screen._call(function, args)
    if kind.full in screen._believed:
        return _Other()
    _require(isinstance(made, _Tensor), "tensor")
    _require_attributes(state)
    return made


_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "collections.Counter": _counter,
    "builtins.set": _set,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "_codecs.encode": _encode,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "torch._utils._rebuild_tensor": _tensor_v1,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
}

_STEPS: dict[bytes, Callable[[_Screen], Any]] = {
    pickle.PROTO: lambda s: s._read(1),
    pickle.NONE: lambda s: s._stack.append(None),
    pickle.NEWTRUE: lambda s: s._stack.append(True),
    pickle.NEWFALSE: lambda s: s._stack.append(False),
    pickle.BININT: lambda s: s._stack.append(s._integer("<i")),
    pickle.BININT1: lambda s: s._stack.append(s._integer("<B")),
    pickle.BININT2: lambda s: s._stack.append(s._integer("<H")),
    pickle.BINFLOAT: lambda s: s._stack.append(struct.unpack(">d", s._read(8))[0]),
    pickle.LONG1: _Screen._long,
    pickle.BINUNICODE: lambda s: s._text(s._integer("<I")),
    pickle.SHORT_BINSTRING: _Screen._old_text,
    pickle.GLOBAL: _Screen._name,
    pickle.EMPTY_TUPLE: lambda s: s._stack.append(()),
    pickle.EMPTY_LIST: lambda s: s._stack.append([]),
    pickle.EMPTY_DICT: lambda s: s._stack.append(_Dict()),
    pickle.EMPTY_SET: lambda s: s._stack.append(_Other()),
    pickle.MARK: _Screen._mark,
    pickle.TUPLE: lambda s: s._stack.append(tuple(s._pop_mark())),
    pickle.TUPLE1: lambda s: s._tuple(1),
    pickle.TUPLE2: lambda s: s._tuple(2),
    pickle.TUPLE3: lambda s: s._tuple(3),
    pickle.APPEND: lambda s: s._extend([s._stack.pop()]),
    pickle.APPENDS: lambda s: s._extend(s._pop_mark()),
    pickle.SETITEM: lambda s: s._set_items([s._stack.pop(-2), s._stack.pop()]),
    pickle.SETITEMS: lambda s: s._set_items(s._pop_mark()),
    pickle.BINPUT: lambda s: s._memo.__setitem__(s._integer("<B"), s._stack[-1]),
    pickle.LONG_BINPUT: lambda s: s._memo.__setitem__(s._integer("<I"), s._stack[-1]),
    pickle.BINGET: lambda s: s._stack.append(s._memo[s._integer("<B")]),
    pickle.LONG_BINGET: lambda s: s._stack.append(s._memo[s._integer("<I")]),
    pickle.REDUCE: _Screen._reduce,
    pickle.NEWOBJ: _Screen._new,
    pickle.BUILD: _Screen._build,
    pickle.BINPERSID: _Screen._stored,
}


def screen(path: pathlib.Path, stand_ins: set[str]) -> None:
    """Raise unless ``torch.save`` can have written ``path``, or what follows is read in no time and little memory.

    Args:
        path: the file.
        stand_ins: names that are answered by functions which check what they are given.

    Raises:
        pickle.UnpicklingError: it refers to something that is not known to be safe.
        ValueError, and others: it is damaged, or made up.
    """
    believed = frozenset(stand_ins | _declared_safe()) - frozenset(_CALLS)
    with path.open("rb") as file:
        is_zip = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
        file.seek(0)
        if is_zip:
            _screen_archive(file, path.stat().st_size, believed)
        else:
            _screen_old_format(file, path.stat().st_size, believed)


def _declared_safe() -> set[str]:
    declared = torch.serialization.get_safe_globals()
    names = {one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in declared}
    # torch declares its nested tensors safe, but checks nothing of what they are made of.
    return {name for name in names if not name.startswith(("torch.nested.", "torch._dynamo."))}


def _screen_archive(file: IO[bytes], size: int, believed: frozenset[str]) -> None:
    _require_plain_end(file, size)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        # torch does not tell capitals from small letters. A name that was cut off at a zero byte is another one to it.
        if len({entry.filename.lower() for entry in entries}) < len(entries) or any(
            entry.orig_filename != entry.filename or entry.compress_type != zipfile.ZIP_STORED for entry in entries
        ):
            raise ValueError("torch.save does not compress, and does not use a name twice")
        root = entries[0].filename.partition("/")[0]
        sizes = {entry.filename: entry.file_size for entry in entries}
        content = archive.read(f"{root}/data.pkl")
    _Screen(
        io.BytesIO(content),
        len(content),
        lambda key, nbytes: sizes.get(f"{root}/data/{key}") == nbytes,
        believed,
    ).run()


def _require_plain_end(file: IO[bytes], size: int) -> None:
    """Raise unless Python and torch take the same bytes for the list of entries."""
    file.seek(max(0, size - 22))
    end = file.read(22)
    if len(end) < 22 or end[:4] != b"PK\x05\x06" or end[20:] != b"\0\0":
        raise ValueError("the end of the archive is missing")
    listed, begin = struct.unpack("<II", end[12:20])
    if begin != 0xFFFFFFFF and listed != 0xFFFFFFFF and begin + listed not in (size - 22, size - 22 - 20 - 56):
        raise ValueError("the list of the archive's entries is not where it should be")


def _screen_old_format(file: IO[bytes], size: int, believed: frozenset[str]) -> None:
    claimed: set[str] = set()
    left = size

    def claim(key: str, nbytes: int) -> bool:
        nonlocal left
        claimed.add(key)
        left -= nbytes + 8  # before each there is its length
        return left >= 0

    if _Screen(file, size).run() != _OLD_MAGIC or _Screen(file, size).run() != _OLD_PROTOCOL:
        raise ValueError("it does not begin as torch.save lets it")
    _Screen(file, size).run()  # of the machine that wrote it
    _Screen(file, size, claim, believed).run()
    keys = _Screen(file, size).run()
    if type(keys) is not list or sorted(map(str, keys)) != sorted(claimed):
        raise ValueError("the tensors and their content do not belong together")
