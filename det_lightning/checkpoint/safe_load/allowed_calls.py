"""The functions that a pickle of ``torch.save`` may call.

Each function here checks the arguments of the one that it replaces, and describes the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from det_lightning.checkpoint.safe_load.descriptions import (
    MAX_NUMEL,
    CheckedElsewhere,
    DescribedDict,
    DescribedStorage,
    DescribedTensor,
    NamedGlobal,
    PlainValue,
    is_count,
)
from det_lightning.checkpoint.safe_load.pickle_interpreter import Interpreter

_QSCHEMES = {
    "torch.per_tensor_affine",
    "torch.per_tensor_symmetric",
    "torch.per_channel_affine",
    "torch.per_channel_symmetric",
    "torch.per_channel_affine_float_qparams",
}
_TENSOR_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter")
_LAYOUTS = {"torch.strided": 0, "torch.sparse_coo": 3} | {
    f"torch.sparse_{kind}": 4 for kind in ("csr", "csc", "bsr", "bsc")
}

# An expanded tensor takes no memory itself, but each copy of it does.
_MANY_ELEMENTS = 2**24
_MAX_EXPANSION = 1000

#: Classes and constants that may be named.
NAMES = frozenset({*_QSCHEMES, *_TENSOR_CLASSES})


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"a call has other arguments than those of torch.save: {what}")


def _ordered_dict(interpreter: Interpreter, items: Any = ()) -> DescribedDict:
    found = DescribedDict(ordered=True)
    _require(
        isinstance(items, list | tuple) and all(isinstance(i, list | tuple) and len(i) == 2 for i in items), "pairs"
    )
    for key, value in items:
        interpreter.require_key(key)
        found.items += [key, value]
    return found


def _counter(_interpreter: Interpreter, counts: Any) -> DescribedDict:
    _require(isinstance(counts, DescribedDict), "counts")
    return DescribedDict(list(counts.items))


def _set(interpreter: Interpreter, items: Any) -> CheckedElsewhere:
    _require(type(items) is list, "items of a set")
    for item in items:
        interpreter.require_key(item)
    return CheckedElsewhere()


def _encode(_interpreter: Interpreter, text: Any, encoding: Any) -> PlainValue:
    _require(isinstance(text, str) and encoding in ("latin1", "latin-1"), "text and encoding")
    return PlainValue()


def _bytearray(_interpreter: Interpreter, content: Any = "", encoding: Any = "latin-1") -> CheckedElsewhere:
    _require(isinstance(content, str | PlainValue) and encoding in ("latin1", "latin-1"), "content")
    return CheckedElsewhere()


def _complex(_interpreter: Interpreter, *parts: Any) -> PlainValue:
    _require(len(parts) == 2 and all(isinstance(part, int | float) for part in parts), "real and imaginary part")
    return PlainValue()


def _size(_interpreter: Interpreter, lengths: Any) -> tuple[int, ...]:
    _require_counts(lengths, "size")
    found: tuple[int, ...] = lengths
    return found


def _device(_interpreter: Interpreter, kind: Any, index: Any = None) -> PlainValue:
    _require(isinstance(kind, str) and (index is None or is_count(index)), "device")
    return PlainValue()


def _layout(_interpreter: Interpreter, name: Any) -> NamedGlobal:
    _require(isinstance(name, str) and name in _LAYOUTS, "layout")
    return NamedGlobal(name)


def _require_counts(values: Any, what: str) -> None:
    _require(type(values) is tuple and len(values) <= 64 and all(map(is_count, values)), what)


def _require_inside(storage: Any, offset: Any, size: Any, stride: Any, itemsize: int | None = None) -> None:
    """Raise unless the elements of a tensor lie in its storage."""
    _require(isinstance(storage, DescribedStorage) and is_count(offset), "storage and offset")
    _require_counts(size, "size")
    _require_counts(stride, "stride")
    _require(len(size) == len(stride) and math.prod(size) < MAX_NUMEL, "size and stride")
    last = sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if 0 not in size else -1
    elements = storage.nbytes // (itemsize or storage.itemsize)
    _require(math.prod(size) <= max(_MANY_ELEMENTS, _MAX_EXPANSION * elements), "a tensor repeats its few elements")
    _require(
        (offset + last + 1) * (itemsize or storage.itemsize) <= storage.nbytes, "a tensor reaches beyond its storage"
    )


def _require_hooks(requires_grad: Any, hooks: Any) -> None:
    _require(isinstance(requires_grad, bool), "requires_grad")
    _require(hooks is None or (isinstance(hooks, DescribedDict) and not hooks.items), "hooks")


def _require_flags(metadata: Any) -> None:
    known = isinstance(metadata, DescribedDict) and all(name in ("conj", "neg") for name in metadata.items[::2])
    _require(metadata is None or (known and all(isinstance(flag, bool) for flag in metadata.items[1::2])), "flags")


def _require_attributes(state: Any) -> None:
    """Raise unless the attributes that a state adds to a tensor have no meaning to torch."""
    parts = state if type(state) is tuple else (state,)
    _require(len(parts) <= 2, "state")
    for part in parts:
        _require(part is None or isinstance(part, DescribedDict), "state")
        names = part.items[::2] if part is not None else []
        _require(all(isinstance(name, str) and not hasattr(torch.nn.Parameter, name) for name in names), "attributes")


def _tensor_v1(_interpreter: Interpreter, storage: Any, offset: Any, size: Any, stride: Any) -> DescribedTensor:
    _require_inside(storage, offset, size, stride)
    return DescribedTensor()


def _tensor_v2(
    _interpreter: Interpreter,
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    metadata: Any = None,
) -> DescribedTensor:
    _require_inside(storage, offset, size, stride)
    _require_hooks(requires_grad, hooks)
    _require_flags(metadata)
    return DescribedTensor()


def _tensor_v3(
    _interpreter: Interpreter,
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> DescribedTensor:
    _require_inside(storage, offset, size, stride, _dtype(dtype).itemsize)
    _require_hooks(requires_grad, hooks)
    _require_flags(metadata)
    return DescribedTensor()


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name.full.removeprefix("torch."), None) if isinstance(name, NamedGlobal) else None
    _require(isinstance(found, torch.dtype), "data type")
    assert isinstance(found, torch.dtype)
    return found


def _quantized(
    _interpreter: Interpreter,
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    quantizer: Any,
    requires_grad: Any,
    hooks: Any,
) -> DescribedTensor:
    _require_inside(storage, offset, size, stride)
    # torch makes an empty tensor of this size first.
    _require(math.prod(size) * storage.itemsize <= storage.nbytes, "a quantized tensor reaches beyond its storage")
    _require_hooks(requires_grad, hooks)
    _require(
        type(quantizer) is tuple and len(quantizer) in (3, 4) and isinstance(quantizer[0], NamedGlobal), "quantizer"
    )
    _require(quantizer[0].full in _QSCHEMES, "quantizer")
    for part in quantizer[1:]:
        numbers = part if type(part) is list else [part]
        _require(all(isinstance(number, int | float | DescribedTensor) for number in numbers), "quantizer")
    return DescribedTensor()


def _sparse(_interpreter: Interpreter, layout: Any, data: Any) -> DescribedTensor:
    """The values of the indices are checked when they exist; see ``numpy_values.finish``."""
    parts = _LAYOUTS.get(layout.full, 0) if isinstance(layout, NamedGlobal) else 0
    _require(parts > 0 and type(data) is tuple and len(data) in (parts, 4), "layout and parts")
    tensors, size, coalesced = (data[:2], data[2], data[3:]) if parts == 3 else (data[:3], data[3], ())
    _require(all(isinstance(tensor, DescribedTensor) for tensor in tensors), "indices and values")
    _require_counts(size, "size")
    _require(all(isinstance(flag, bool | None) for flag in coalesced), "coalesced")
    return DescribedTensor()


def _meta(_interpreter: Interpreter, dtype: Any, size: Any, stride: Any, requires_grad: Any) -> DescribedTensor:
    _dtype(dtype)
    _require_counts(size, "size")
    _require_counts(stride, "stride")
    _require(len(size) == len(stride) and isinstance(requires_grad, bool), "size and stride")
    return DescribedTensor()


def _parameter(
    _interpreter: Interpreter, data: Any, requires_grad: Any, hooks: Any, state: Any = None
) -> DescribedTensor:
    _require(isinstance(data, DescribedTensor), "tensor")
    _require_hooks(requires_grad, hooks)
    _require_attributes(state)
    return DescribedTensor(state)


def _from_type(interpreter: Interpreter, function: Any, kind: Any, args: Any, state: Any) -> Any:
    _require(
        isinstance(kind, NamedGlobal) and (kind.full in _TENSOR_CLASSES or kind.full in interpreter.safe_names), "class"
    )
    made = interpreter.call(function, args)
    if kind.full in interpreter.safe_names:
        return CheckedElsewhere()
    _require(isinstance(made, DescribedTensor), "tensor")
    _require_attributes(state)
    return DescribedTensor((made, state))


#: For each function, by its name, the one that checks its arguments.
CALLS: dict[str, Callable[..., Any]] = {
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
