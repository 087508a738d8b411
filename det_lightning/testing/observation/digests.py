"""Values in a form that can be kept, compared to the bit, and told apart in words."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = [
    "Fingerprint",
    "amount",
    "equal",
    "fingerprint",
    "flat",
    "frozen",
    "generator_state",
    "nested_fingerprint",
    "shown",
]


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What is kept of a tensor or array.

    Attributes:
        digest: of type, shape and bits.
        norm: the Euclidean norm of its elements; NaN where it has none.
    """

    digest: str
    norm: float = dataclasses.field(compare=False)


def fingerprint(value: torch.Tensor | np.ndarray[Any, Any]) -> Fingerprint:
    """Return what tells a tensor or array from others."""
    if isinstance(value, torch.Tensor):
        if torch.nn.parameter.is_lazy(value):
            return Fingerprint("no shape yet", float("nan"))
        if value.layout is not torch.strided or value.is_quantized:
            return Fingerprint(f"{value.layout} {value.dtype} {tuple(value.shape)}", float("nan"))
        value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        dtype, shape = str(value.dtype), tuple(value.shape)
        data = value.reshape(-1).view(torch.uint8).numpy() if value.numel() else np.empty(0, np.uint8)
        norm = _norm(value)
    else:
        dtype, shape = str(value.dtype), value.shape
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8) if value.size else np.empty(0, np.uint8)
        norm = float(np.linalg.norm(value.astype(np.float64).ravel())) if value.dtype.kind in "fiub" else float("nan")
    digest = hashlib.blake2b(data.data, digest_size=12)
    digest.update(f"{dtype} {shape}".encode())
    return Fingerprint(digest.hexdigest(), norm)


def _norm(value: torch.Tensor) -> float:
    if not (value.is_floating_point() or value.is_complex()):
        value = value.double()
    elif value.element_size() < 2:  # float8, which has no arithmetic
        value = value.float()
    return float(torch.linalg.vector_norm(value, dtype=None if value.is_complex() else torch.float64))


def nested_fingerprint(value: Any) -> Fingerprint:
    """Return one fingerprint for all that is nested in a batch of data."""
    digest, squares = hashlib.blake2b(digest_size=12), 0.0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping):
            waiting += [part for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple):
            waiting += item
        elif isinstance(item, torch.Tensor | np.ndarray):
            print_of = fingerprint(item)
            squares += 0.0 if math.isnan(print_of.norm) else print_of.norm**2
            digest.update(print_of.digest.encode())
        elif isinstance(item, bool | int | float | str | bytes | type(None)):
            digest.update(repr(item).encode())
        else:
            digest.update(type(item).__qualname__.encode())
    return Fingerprint(digest.hexdigest(), math.sqrt(squares))


def frozen(value: Any) -> Any:
    """Return a copy of a metric, or of what is nested in it, that later changes do not reach."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype is torch.bfloat16 else value).resolve_conj().clone().numpy()
    if isinstance(value, np.ndarray | np.generic):
        return np.array(value)
    if isinstance(value, Mapping):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(item) for item in value]
    return value


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is nested in a state, by path; tensors by their fingerprints."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from flat(item, f"{path}[{index}]")
    else:
        yield path, fingerprint(value) if isinstance(value, torch.Tensor) else value


def arrays_in(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the tensors and arrays that are nested in a batch, as arrays, but for single numbers."""
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim:
            yield frozen(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from arrays_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays_in(item)


def generator_state(value: Any) -> Any:
    """Return the state of a random generator, None for anything else."""
    if isinstance(value, torch.Generator):
        return fingerprint(value.get_state())
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return hashlib.blake2b(repr(value.getstate()).encode(), digest_size=12).hexdigest()
    return None


def equal(one: Any, other: Any) -> bool:
    """Tell whether two frozen values are equal, NaN being equal to NaN."""
    if isinstance(one, np.ndarray | np.generic) or isinstance(other, np.ndarray | np.generic):
        one, other = np.asarray(one), np.asarray(other)
        return (one.shape == other.shape and one.tobytes() == other.tobytes()) or _equal_numbers(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (one != one and other != other)
    comparison: Any = type(one).__eq__
    if comparison is object.__eq__:
        return type(one) is type(other)  # nothing more can be told from run to run
    try:
        return bool(one == other)
    except Exception:  # of classes of others, which may compare as they like
        return repr(one) == repr(other)


def _equal_numbers(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind not in "fciub" or other.dtype.kind not in "fciub":
        return bool(one.tolist() == other.tolist())
    return bool(np.array_equal(one, other, equal_nan=True))


def amount(one: Any, other: Any) -> float | None:
    """Return how far two values are apart at most; None where that is no number."""
    if isinstance(one, Fingerprint) and isinstance(other, Fingerprint):
        return abs(one.norm - other.norm)
    try:
        apart = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))
        return float(apart.max()) if apart.size else 0.0
    except (TypeError, ValueError):
        return None


def shown(value: Any) -> str:
    """Return a value in a few characters."""
    if isinstance(value, Fingerprint):
        return f"norm {value.norm:.9g}"
    if isinstance(value, np.ndarray | np.generic) and np.ndim(value) == 0:
        value = value.item()
    if isinstance(value, float):
        return f"{value:.9g}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
