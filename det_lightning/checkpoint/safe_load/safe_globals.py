"""Which names a state file may refer to; replaces functions that trust their arguments.

numpy's functions do, and forged arguments crash the process. So pickled arrays, scalars and data types are read into
plain descriptions, and :func:`finish` turns these into numpy objects.

Change here: a class of the standard library that may be read is an entry of ``CONSTRUCTORS`` in
``det_lightning/checkpoint/format/standard_values.py``; any other is an entry of ``_DECLARED``.
"""

from __future__ import annotations

import collections
import contextlib
import math
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from det_lightning.checkpoint.format.standard_values import CONSTRUCTORS, list_slots

# Others, whose items torch cannot set, hold values in attributes only.
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, slice)
# torch's lists of allowed names belong to the whole process.
_lock = threading.RLock()


class DataType:
    """A pickled numpy data type. The flags, integers before numpy 1.20, mean nothing for a plain type."""

    __slots__ = ("dtype",)  # so that no other object can take on this class

    def __init__(self, code: Any = None, align: Any = False, copy: Any = False) -> None:
        self.dtype = _make_plain_dtype(code)

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or not 5 <= len(state) <= 9:
            raise ValueError("the state of a numpy data type has unexpected parts")
        byte_order, subtype, names, fields = state[1:5]
        if (subtype, names, fields) != (None, None, None):
            raise pickle.UnpicklingError("a numpy data type of records or arrays")
        if byte_order not in ("<", ">", "=", "|"):
            raise ValueError(f"a numpy data type has the byte order {_show(byte_order)}")
        if self.dtype.kind in "mM" and len(state) == 9:
            self.dtype = _with_unit(self.dtype, state[8])
        self.dtype = np.dtype(self.dtype.newbyteorder(byte_order).str)


def _with_unit(dtype: np.dtype[Any], metadata: Any) -> np.dtype[Any]:
    """Return a data type of times with the unit; numpy pickles both side by side."""
    _, (unit, count, *_) = metadata
    unit = unit.decode("ascii") if isinstance(unit, bytes) else unit
    if not isinstance(unit, str) or len(unit) > 7 or type(count) is not int or not 0 < count < 2**31:
        raise ValueError("the unit of a numpy data type has unexpected parts")
    return dtype if unit == "generic" else _make_plain_dtype(f"{dtype.kind}8[{count}{unit}]")


class _Array:
    """A pickled numpy array."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise ValueError("the state of a numpy array has unexpected parts")
        _version, shape, data_type, is_fortran, content = state
        self.array = _make_array(content, data_type, shape, "F" if is_fortran else "C")


def _make_array(content: Any, data_type: Any, shape: Any, order: Any, *_: Any) -> np.ndarray[Any, Any]:
    """Stand in for the function by which numpy pickles an array in protocol 5."""
    dtype = _require_dtype(data_type)
    if type(shape) is not tuple or len(shape) > 64:
        raise ValueError("an array has at most 64 dimensions")
    for length in shape:
        if not isinstance(length, int) or not 0 <= length < 2**63:
            raise ValueError(f"expected a number of elements; got {_show(length)}")
    if not isinstance(content, bytes | bytearray) or len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of shape {list(shape)} and type {dtype} does not fit its content")
    return np.frombuffer(bytearray(content), dtype).reshape(shape, order="F" if order == "F" else "C")


def _show(value: Any) -> str:
    return f"{value!r:.100}" if isinstance(value, str | int | float | type) else f"a {type(value).__name__}"


def _make_plain_dtype(code: Any) -> np.dtype[Any]:
    if not isinstance(code, str) or len(code) > 16:
        raise ValueError(f"a numpy data type is named by a short string; got {_show(code)}")
    dtype = np.dtype(code)
    if dtype.hasobject or not dtype.itemsize or dtype.names or dtype.subdtype:
        raise pickle.UnpicklingError(f"a numpy data type {code!r}, which is not one of plain values")
    return dtype


def _require_dtype(described: Any) -> np.dtype[Any]:
    if not isinstance(described, DataType):
        raise ValueError(f"expected a numpy data type; got {_show(described)}")
    return described.dtype


def _begin_array(kind: Any, *_: Any) -> _Array:
    if kind is not _Array:
        raise ValueError(f"only numpy arrays can be read as arrays; got {_show(kind)}")
    return _Array()


def _make_scalar(data_type: Any, content: Any) -> Any:
    """Stand in for the function by which numpy pickles a scalar."""
    dtype = _require_dtype(data_type)
    if not isinstance(content, bytes) or len(content) != dtype.itemsize:
        raise ValueError(f"a scalar of type {dtype} does not fit its content")
    return np.frombuffer(content, dtype)[0]


def _encode_latin(text: str, encoding: str) -> bytes:
    """Stand in for ``_codecs.encode``, by which protocol 2 pickles bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes are pickled as latin1; got {_show(encoding)}")
    return text.encode("latin-1")


# Stand for classes of schedulers.
_OneCycle = type("_OneCycle", (), {"__slots__": ()})
_SWA = type("_SWA", (), {"__slots__": ()})
# Their functions that are in states: of OneCycleLR before torch 2.0, of SWALR also in 2.7.
_ANNEALING: dict[Any, Any] = {
    _OneCycle: (torch.optim.lr_scheduler.OneCycleLR, "_annealing_cos", "_annealing_linear"),
    _SWA: (torch.optim.swa_utils.SWALR, "_cosine_anneal", "_linear_anneal"),
}


def _attribute(owner: Any, name: Any) -> Any:
    """Stand in for ``getattr``, by which torch pickled the ``anneal_func`` of schedulers."""
    scheduler, *names = _ANNEALING.get(owner, [None])
    if name not in names:
        raise pickle.UnpicklingError(f"getattr({_show(owner)}, {_show(name)})")
    return getattr(scheduler, name)


_NUMPY: dict[str, Any] = {
    "numpy.ndarray": _Array,
    "numpy.dtype": DataType,
    **{f"numpy.{core}.multiarray._reconstruct": _begin_array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _make_scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _make_array for core in ("core", "_core")},
    "builtins.bytes": lambda: b"",  # so are b"" and arrays without elements pickled
}
#: What the pickles of random states call, by the names in them.
RANDOM_STATES: dict[str, Any] = {**_NUMPY, "_codecs.encode": _encode_latin}

#: The names that make an object which checks the state that a file gives it.
CHECK_STATE = frozenset(_NUMPY)
#: The names that make an object which takes a dict of attributes as its state. No other object takes a state.
TAKE_ATTRIBUTES = frozenset({"argparse.Namespace", "collections.OrderedDict", "types.SimpleNamespace", "uuid.UUID"})

# Declared to torch, beside its own list.
_DECLARED: dict[str, Any] = {
    **CONSTRUCTORS,
    **_NUMPY,
    "builtins.getattr": _attribute,
    "torch.optim.lr_scheduler.OneCycleLR": _OneCycle,
    "torch.optim.swa_utils.SWALR": _SWA,
}

#: The classes of storages, and the bytes of an element.
STORAGES = {
    "torch.storage.UntypedStorage": 1,
    **{f"torch.{kind}Storage": 1 for kind in ("Char", "Byte", "Bool", "QUInt8", "QInt8", "QUInt4x2", "QUInt2x4")},
    **{f"torch.{kind}Storage": 2 for kind in ("Half", "BFloat16", "Short")},
    **{f"torch.{kind}Storage": 4 for kind in ("Float", "Int", "QInt32")},
    **{f"torch.{kind}Storage": 8 for kind in ("Double", "Long", "ComplexFloat")},
    "torch.ComplexDoubleStorage": 16,
}

# What torch.save writes of torch's own list. The rest of it makes tensors of classes, nested ones among them, whose
# parts torch does not check.
_OF_TORCH = frozenset(
    {
        *("_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set"),
        *("collections.Counter", "collections.OrderedDict"),
        *("torch.Size", "torch.Tensor", "torch.device", "torch.nn.parameter.Parameter"),
        *("torch.serialization._get_layout", "torch._tensor._rebuild_from_type_v2"),
        *(f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "qtensor", "sparse_tensor")),
        *(f"torch._utils._rebuild_{kind}" for kind in ("parameter", "parameter_with_state", "meta_tensor_no_storage")),
        *(f"torch.per_tensor_{kind}" for kind in ("affine", "symmetric")),
        *(f"torch.per_channel_{kind}" for kind in ("affine", "symmetric", "affine_float_qparams")),
    }
)
_DTYPES = frozenset(f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype))
# Importing these declares classes to torch: a DeviceMesh opens connections, parts of nested tensors are not checked.
_NEVER = ("torch.distributed.", "torch.nested.", "torch._dynamo.")

#: The names that make tensors and plain containers. A tensor with attributes may be of any class.
TENSORS = (_OF_TORCH | _DTYPES | STORAGES.keys()) - {"torch._tensor._rebuild_from_type_v2"}
#: The names that a state file may refer to, whatever the user has declared.
ALLOWED = _OF_TORCH | _DTYPES | STORAGES.keys() | _DECLARED.keys()


def find_declared() -> dict[str, Any]:
    """Return the objects that the user has declared safe to torch, by name, without forbidden ones and stand-ins."""
    named = [
        one if isinstance(one, tuple) else (one, f"{one.__module__}.{one.__qualname__}")
        for one in torch.serialization.get_safe_globals()
    ]
    return {name: one for one, name in named if name not in _DECLARED and not name.startswith(_NEVER)}


@contextlib.contextmanager
def allow_safe_values() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` read our list and the user's; pass the result to :func:`finish`.

    Sparse tensors with indices beyond their size are refused; torch would write out of bounds.
    """
    check_sparse: Any = torch.sparse.check_sparse_tensor_invariants  # torch has no types for it
    with _lock, check_sparse():
        before: list[Any] = torch.serialization.get_safe_globals()
        names = {**find_declared(), **_DECLARED}
        torch.serialization.clear_safe_globals()
        _forget_sparse()
        try:
            torch.serialization.add_safe_globals([(one, name) for name, one in names.items()])
            yield
        finally:
            _forget_sparse()
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _forget_sparse() -> None:
    """Make torch forget the unchecked sparse tensors of a file that could not be read."""
    utils: Any = torch._utils  # later releases than 2.13 have a function for the list
    getattr(utils, "_get_sparse_tensors_to_validate", lambda: utils._sparse_tensors_to_validate)().clear()


def finish(value: Any, done: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """Return ``value``, read under :func:`allow_safe_values`, with numpy objects in place of descriptions."""
    done = {} if done is None else done
    if isinstance(value, DataType):
        return value.dtype
    if isinstance(value, _Array):
        if value.array is None:
            raise ValueError("an array has no content")
        return value.array
    attributes = getattr(value, "__dict__", None)
    slots = list_slots(type(value))
    if isinstance(value, type) or not (attributes or slots or isinstance(value, _CONTAINERS)):
        return value
    if id(value) not in done:
        # The original is kept alive with the result, so that no other object gets its id.
        done[id(value)] = value, value
        for name in slots:
            if hasattr(value, name) and (found := finish(item := getattr(value, name), done)) is not item:
                object.__setattr__(value, name, found)
        done[id(value)] = value, _finish_container(value, attributes or {}, done)
    return done[id(value)][1]


def _finish_container(value: Any, attributes: dict[str, Any], done: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(value, dict) and (hidden := [name for name in attributes if hasattr(type(value), str(name))]):
        raise ValueError(f"an OrderedDict has an attribute in place of its method {hidden[0]!r:.100}")
    _finish_items(attributes, done)
    if isinstance(value, dict):
        _finish_items(value, done)
    elif isinstance(value, list | collections.deque):
        for index, item in enumerate(list(value)):
            value[index] = finish(item, done)
    elif isinstance(value, slice):
        return slice(*(finish(part, done) for part in (value.start, value.stop, value.step)))
    elif isinstance(value, tuple | set | frozenset):
        items = [finish(item, done) for item in value]
        if any(item is not before for item, before in zip(items, value, strict=True)):
            return _remake(value, items, attributes)
    return value


def _remake(value: Any, items: list[Any], attributes: dict[str, Any]) -> Any:
    """Return a tuple or set of the same class with other items, without calling its constructor."""
    base: Any = next(kind for kind in (tuple, set, frozenset) if isinstance(value, kind))
    remade = base.__new__(type(value), items)
    if base is set:
        set.update(remade, items)
    if attributes:
        vars(remade).update(attributes)
    return remade


def _finish_items(values: dict[Any, Any], done: dict[int, tuple[Any, Any]]) -> None:
    finished = [(finish(key, done), finish(item, done)) for key, item in values.items()]
    if any(key is not one or item is not values[one] for (key, item), one in zip(finished, values, strict=True)):
        values.clear()  # the order stays
        for key, item in finished:
            values[key] = item
