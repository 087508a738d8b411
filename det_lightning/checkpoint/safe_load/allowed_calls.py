"""The functions that a pickle of ``torch.save`` may call: their arguments, and what they return.

This narrows torch's own allow-list. To admit another type, give it a stand-in in ``stand_ins``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from det_lightning.checkpoint.safe_load.descriptions import (
    BYTES_OF_VALUE,
    MAX_NUMEL,
    CheckedElsewhere,
    DescribedDict,
    DescribedStorage,
    DescribedTensor,
    LongText,
    NamedGlobal,
    PlainValue,
    is_count,
    require_fast_keys,
    require_key,
)
from det_lightning.checkpoint.safe_load.pickle_interpreter import Interpreter
from det_lightning.checkpoint.safe_load.stand_ins import DataType, make_scalar

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

# An expanded tensor takes no memory, but copies of it do.
_MANY_ELEMENTS = 2**24
_MAX_EXPANSION = 1000

# So much less than a copy counts another view of a storage: nothing is copied yet, but later code does copy it.
_VIEWS = 16

#: Classes and constants that may be named.
NAMES = frozenset({*_QSCHEMES, *_TENSOR_CLASSES})


def _are_pairs(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(i, list | tuple) and len(i) == 2 for i in value)


def _are_counts(value: Any) -> bool:
    return type(value) is tuple and len(value) <= 64 and all(map(is_count, value))


def _are_flags(value: Any) -> bool:
    return value is None or (
        isinstance(value, DescribedDict)
        and len(value.items) <= 4
        and all(name in ("conj", "neg") for name in value.items[::2])
        and all(isinstance(flag, bool) for flag in value.items[1::2])
    )


def _are_attributes(state: Any) -> bool:
    """Return whether the attributes that a state adds to a tensor mean nothing to torch."""
    parts = state if type(state) is tuple else (state,)
    if len(parts) > 2 or not all(isinstance(part, DescribedDict | None) for part in parts):
        return False
    names = [name for part in parts if part is not None for name in part.items[::2]]
    return all(isinstance(name, str) and not hasattr(torch.nn.Parameter, name) for name in names)


def _is_quantizer(value: Any) -> bool:
    if type(value) is not tuple or len(value) not in (3, 4) or not isinstance(value[0], NamedGlobal):
        return False
    numbers = [number for part in value[1:] for number in (part if type(part) is list else [part])]
    return value[0].full in _QSCHEMES and all(isinstance(one, int | float | DescribedTensor) for one in numbers)


def _dtype_of(name: Any) -> torch.dtype | None:
    found = getattr(torch, name.full.removeprefix("torch."), None) if isinstance(name, NamedGlobal) else None
    return found if isinstance(found, torch.dtype) else None


def _is(kind: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


# Which values the argument of each name may have.
_ARGUMENTS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("text", "device", "code"), _is(str)),
    "requires_grad": _is(bool),
    **dict.fromkeys(("align", "copy"), lambda value: value in (0, 1)),  # numpy before 1.20 wrote integers
    **dict.fromkeys(("real", "imaginary"), _is(int | float)),
    **dict.fromkeys(("function", "kind"), _is(NamedGlobal)),
    **dict.fromkeys(("size", "stride"), _are_counts),
    **dict.fromkeys(("parts", "args"), lambda value: type(value) is tuple),
    "content": _is(str | bytes | PlainValue),
    "counts": _is(DescribedDict),
    "storage": _is(DescribedStorage),
    "tensor": _is(DescribedTensor),
    "data_type": _is(DataType),
    "state": _is(object),
    "pairs": _are_pairs,
    "items": lambda value: type(value) is list,
    "encoding": lambda value: value in ("latin1", "latin-1"),
    "index": lambda value: value is None or is_count(value),
    "offset": is_count,
    "layout_name": lambda value: isinstance(value, str) and value in _LAYOUTS,
    "layout": lambda value: isinstance(value, NamedGlobal) and _LAYOUTS.get(value.full, 0) > 0,
    "dtype": lambda value: _dtype_of(value) is not None,
    "quantizer": _is_quantizer,
    "hooks": lambda value: value is None or (isinstance(value, DescribedDict) and not value.items),
    "flags": _are_flags,
    "attributes": _are_attributes,
}


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"a call has other arguments than those of torch.save: {what}")


def _check(parameters: str, describe: Callable[..., Any], interpreter: Interpreter, *args: Any) -> Any:
    """Check the arguments of a call and describe its result; parameters with a bracket may be left out."""
    names = parameters.split()
    required = [name for name in names if not name.startswith("[")]
    _require(len(required) <= len(args) <= len(names), "their number")
    given = {name.strip("[]"): value for name, value in zip(names, args, strict=False)}
    for name, value in given.items():
        _require(_ARGUMENTS[name](value), name)
    return describe(interpreter, **given)


def _ordered_dict(interpreter: Interpreter, pairs: Any = ()) -> DescribedDict:
    interpreter.charge(2 * BYTES_OF_VALUE * len(pairs))
    for key, _ in pairs:
        require_key(key)
    return DescribedDict([part for pair in pairs for part in pair], ordered=True)


def _counter(interpreter: Interpreter, counts: DescribedDict) -> DescribedDict:
    interpreter.charge(BYTES_OF_VALUE * len(counts.items))
    return DescribedDict(list(counts.items))


def _set(interpreter: Interpreter, items: list[Any]) -> CheckedElsewhere:
    interpreter.charge(BYTES_OF_VALUE * len(items))
    for item in items:
        require_key(item)
    require_fast_keys(items)
    return CheckedElsewhere()


def _encoded(_interpreter: Interpreter, text: str, **_: Any) -> Any:
    return PlainValue(text.size) if isinstance(text, LongText) else text.encode("latin-1")


def _numpy_scalar(_interpreter: Interpreter, data_type: DataType, content: Any) -> Any:
    return make_scalar(data_type, content) if isinstance(content, bytes) else PlainValue()


def _strided(
    interpreter: Interpreter,
    storage: DescribedStorage,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: Any = None,
    quantizer: Any = None,
    **_: Any,
) -> DescribedTensor:
    """Describe a tensor, whose elements must lie within its storage."""
    found = _dtype_of(dtype)
    itemsize = storage.itemsize if found is None else found.itemsize
    count = math.prod(size)
    _require(len(size) == len(stride) and count < MAX_NUMEL, "size and stride")
    last = sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if 0 not in size else -1
    most = max(_MANY_ELEMENTS, _MAX_EXPANSION * (storage.nbytes // itemsize))
    _require(count <= most, "a tensor repeats its few elements")
    _require((offset + last + 1) * itemsize <= storage.nbytes, "a tensor reaches beyond its storage")
    # torch first allocates an empty quantized tensor of this size.
    if quantizer is not None:
        _require(count * itemsize <= storage.nbytes, "a quantized tensor reaches beyond its storage")
        _charge(interpreter, quantizer)
        interpreter.charge(sum(BYTES_OF_VALUE * len(part) for part in quantizer if isinstance(part, list)))
    interpreter.charge(count * itemsize // _VIEWS)
    return DescribedTensor(nbytes=count * itemsize)


def _charge(interpreter: Interpreter, parts: Iterable[Any]) -> None:
    """Charge for tensors whose values a call reads, or copies."""
    interpreter.charge(sum(part.nbytes for part in parts if isinstance(part, DescribedTensor)))


def _sparse(interpreter: Interpreter, layout: NamedGlobal, parts: tuple[Any, ...]) -> DescribedTensor:
    """Describe a sparse tensor, whose indices are checked once their values are read; see ``allow_safe_values``."""
    count = _LAYOUTS[layout.full]
    _require(len(parts) in (count, 4), "layout and parts")
    tensors, size, coalesced = (parts[:2], parts[2], parts[3:]) if count == 3 else (parts[:3], parts[3], ())
    _require(all(isinstance(tensor, DescribedTensor) for tensor in tensors), "indices and values")
    _charge(interpreter, tensors)
    _require(_are_counts(size), "size")
    _require(all(isinstance(flag, bool | None) for flag in coalesced), "coalesced")
    return DescribedTensor(nbytes=sum(tensor.nbytes for tensor in tensors))


def _parameter(interpreter: Interpreter, tensor: DescribedTensor, attributes: Any = None, **_: Any) -> DescribedTensor:
    _charge_attributes(interpreter, attributes)
    return DescribedTensor((tensor, attributes), tensor.nbytes)


def _charge_attributes(interpreter: Interpreter, state: Any) -> None:
    dicts = [part for part in (state if type(state) is tuple else (state,)) if isinstance(part, DescribedDict)]
    interpreter.charge(BYTES_OF_VALUE * sum(len(part.items) for part in dicts))


def _from_type(interpreter: Interpreter, function: Any, kind: NamedGlobal, args: Any, state: Any) -> Any:
    is_safe = kind.full in interpreter.safe_names
    _require(is_safe or kind.full in _TENSOR_CLASSES, "class")
    made = interpreter.call(function, args)
    if is_safe:
        return CheckedElsewhere()
    _require(isinstance(made, DescribedTensor), "tensor")
    _require(_are_attributes(state), "attributes")
    _charge_attributes(interpreter, state)
    return DescribedTensor((made, state), made.nbytes)


def _meta(_interpreter: Interpreter, size: tuple[int, ...], stride: tuple[int, ...], **_: Any) -> DescribedTensor:
    _require(len(size) == len(stride), "size and stride")
    return DescribedTensor()


_STRIDED = "storage offset size stride"
_PARAMETER = "tensor requires_grad hooks [attributes]"

#: For each function that may be called, by name, a function that checks the arguments and describes the result.
CALLS: dict[str, Callable[..., Any]] = {
    name: functools.partial(_check, parameters, describe)
    for name, parameters, describe in (
        ("collections.OrderedDict", "[pairs]", _ordered_dict),
        ("collections.Counter", "counts", _counter),
        ("builtins.set", "items", _set),
        ("builtins.bytearray", "[content] [encoding]", lambda _, **__: CheckedElsewhere()),
        ("builtins.bytes", "", lambda _: b""),
        ("builtins.complex", "real imaginary", lambda _, real, imaginary: complex(real, imaginary)),
        ("_codecs.encode", "text encoding", _encoded),
        ("numpy.dtype", "code [align] [copy]", lambda _, code, **__: DataType(code)),
        ("numpy.core.multiarray.scalar", "data_type content", _numpy_scalar),
        ("numpy._core.multiarray.scalar", "data_type content", _numpy_scalar),
        ("torch.Size", "size", lambda _, size: size),
        ("torch.device", "device [index]", lambda _, **__: PlainValue()),
        ("torch.serialization._get_layout", "layout_name", lambda _, layout_name: NamedGlobal(layout_name)),
        ("torch._utils._rebuild_tensor", _STRIDED, _strided),
        ("torch._utils._rebuild_tensor_v2", f"{_STRIDED} requires_grad hooks [flags]", _strided),
        ("torch._utils._rebuild_tensor_v3", f"{_STRIDED} requires_grad hooks dtype [flags]", _strided),
        ("torch._utils._rebuild_qtensor", f"{_STRIDED} quantizer requires_grad hooks", _strided),
        ("torch._utils._rebuild_sparse_tensor", "layout parts", _sparse),
        ("torch._utils._rebuild_meta_tensor_no_storage", "dtype size stride requires_grad", _meta),
        ("torch._utils._rebuild_parameter", _PARAMETER, _parameter),
        ("torch._utils._rebuild_parameter_with_state", _PARAMETER, _parameter),
        ("torch._tensor._rebuild_from_type_v2", "function kind args state", _from_type),
    )
}

#: Those that read, or may read, the values of tensors when they are called.
READ_VALUES = frozenset(
    {"torch._utils._rebuild_qtensor", "torch._utils._rebuild_sparse_tensor", "torch._tensor._rebuild_from_type_v2"}
)
