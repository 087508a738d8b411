"""The types that a state may hold beyond torch's allow-list, and the numpy values in it.

numpy's own functions trust their arguments: forged ones crash the process. So pickled arrays, scalars and data types
are read into plain descriptions, which :func:`finish` turns into numpy objects.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

# Booleans, integers, floats, complex numbers, bytes and strings: none of them refers to Python objects.
_PLAIN_KINDS = "?bBhHiIlLqQefdgFDGSUV"


class DataType:
    """A pickled numpy data type."""

    def __init__(self, code: Any = None, align: Any = False, copy: Any = False) -> None:
        self.dtype = _plain_dtype(code)

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or not 5 <= len(state) <= 9:
            raise ValueError("the state of a numpy data type has other parts")
        byte_order, subtype, names, fields = state[1:5]
        if byte_order not in ("<", ">", "=", "|") or (subtype, names, fields) != (None, None, None):
            raise ValueError("only plain numpy data types can be read; got one of another kind")
        self.dtype = self.dtype.newbyteorder(byte_order)


class _Array:
    """A pickled numpy array."""

    def __init__(self) -> None:
        self.array: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple:
            raise ValueError("the state of a numpy array has other parts")
        _version, shape, data_type, is_fortran, content = state
        dtype = _dtype_of(data_type)
        for length in shape:
            if not isinstance(length, int) or length < 0:
                raise ValueError(f"expected a number of elements; got {_shown(length)}")
        shape = list(shape)
        if not isinstance(content, bytes) or len(content) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"an array of shape {shape} and type {dtype} does not fit its content")
        flat = np.frombuffer(bytearray(content), dtype)
        self.array = flat.reshape(shape, order="F" if is_fortran else "C")


def _shown(value: Any) -> str:
    """Return a short text for a value; the repr() of nested ones may not fit into memory."""
    return f"{value!r:.100}" if isinstance(value, str | int | float | type) else f"a {type(value).__name__}"


def _plain_dtype(code: Any) -> np.dtype[Any]:
    if not isinstance(code, str) or len(code) > 16:
        raise ValueError(f"a numpy data type is named by a short string; got {_shown(code)}")
    dtype = np.dtype(code)
    if dtype.char not in _PLAIN_KINDS or dtype.itemsize == 0 or dtype.names or dtype.subdtype:
        raise ValueError(f"only plain numpy data types can be read; got {code!r}")
    return dtype


def _dtype_of(described: Any) -> np.dtype[Any]:
    if not isinstance(described, DataType):
        raise ValueError(f"expected a numpy data type; got {_shown(described)}")
    return described.dtype


def _begin_array(kind: Any, *_: Any) -> _Array:
    if kind is not _Array:
        raise ValueError(f"only numpy arrays can be read as arrays; got {_shown(kind)}")
    return _Array()


def make_scalar(data_type: Any, content: Any) -> Any:
    """Stand in for the function with which numpy pickles a scalar."""
    dtype = _dtype_of(data_type)
    if not isinstance(content, bytes) or len(content) != dtype.itemsize:
        raise ValueError(f"a scalar of type {dtype} does not fit its content")
    return np.frombuffer(content, dtype)[0]


def _no_bytes() -> bytes:
    """Stand in for ``bytes``, with which ``b""`` and arrays without elements are pickled."""
    return b""


class _OneCycle:
    """Stands for the class ``OneCycleLR``."""


def _attribute(owner: Any, name: Any) -> Any:
    """Stand in for ``getattr``, with which torch before 2.0 pickled the ``anneal_func`` of ``OneCycleLR``."""
    if owner is not _OneCycle or name not in ("_annealing_cos", "_annealing_linear"):
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL getattr({_shown(owner)}, {_shown(name)})")
    return getattr(torch.optim.lr_scheduler.OneCycleLR, name)


#: The names that have stand-ins here, and the stand-ins.
STAND_INS: dict[str, Any] = {
    "numpy.ndarray": _Array,
    "numpy.dtype": DataType,
    **{f"numpy.{core}.multiarray._reconstruct": _begin_array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": make_scalar for core in ("core", "_core")},
    "builtins.bytes": _no_bytes,
    "builtins.getattr": _attribute,
    "torch.optim.lr_scheduler.OneCycleLR": _OneCycle,
}


@contextlib.contextmanager
def allow_safe_values() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` read numpy values in the block; pass its result to :func:`finish`.

    Sparse tensors with indices beyond their size are refused; torch would trust them, and write out of bounds.
    """
    stand_ins = torch.serialization.safe_globals([(stand_in, name) for name, stand_in in STAND_INS.items()])
    check_sparse: Any = torch.sparse.check_sparse_tensor_invariants  # torch has no types for it
    with stand_ins, check_sparse():
        yield


def finish(value: Any) -> Any:
    """Return ``value``, read under :func:`allow_safe_values`, with numpy objects in place of their descriptions."""
    return _finish(value, {})


def _finish(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(value, DataType):
        return value.dtype
    if isinstance(value, _Array):
        if value.array is None:
            raise ValueError("an array has no content")
        return value.array
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) in done:
        return done[id(value)][1]
    # The original is kept alive with the result, so that no other object gets its id.
    done[id(value)] = value, value
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _finish(value[key], done)
    elif isinstance(value, list):
        value[:] = [_finish(item, done) for item in value]
    elif type(value) is tuple:
        items = tuple(_finish(item, done) for item in value)
        if any(item is not before for item, before in zip(items, value, strict=True)):
            done[id(value)] = value, items
    return done[id(value)][1]
