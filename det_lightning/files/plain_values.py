"""Converts values to JSON's types: dicts with text as keys, lists, text, numbers, true, false and null.

numpy's scalars become numbers; arrays and tensors become lists, and so do tuples, ranges and the lists of configuration
libraries. Other values are left out and named, or refused; none becomes a text that describes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from det_lightning.escaping import name_type
from det_lightning.files.strict_json import MAX_DEPTH

#: A longer array belongs into the state of a trial, not into its settings: files of these have some megabytes at most.
MOST_IN_SETTINGS = 10_000
# One level is left for the object around the values; a file with more is taken for damage.
_MOST_NESTED = MAX_DEPTH - 1
# The kinds of numpy's data types that are numbers of JSON, truth values, or text.
_KINDS = "biufU"


class NotPlainError(TypeError):
    """A value that JSON cannot hold."""

    def __init__(self, where: str, type_name: str, reason: str = "which JSON cannot hold") -> None:
        super().__init__(f"{where} is a {type_name}, {reason}.")


def as_plain(
    value: Any, where: str = "the value", losses: list[str] | None = None, most_numbers: float = math.inf
) -> Any:
    """Return ``value`` converted to JSON's types; messages call it ``where``.

    Entries of dicts that JSON cannot hold, and arrays with more than ``most_numbers``, are left out. ``losses`` gets a
    sentence for each, and for a dict whose keys become text. Without ``losses``, such a value raises a ``TypeError``.
    """
    try:
        return _Converter(losses, most_numbers).convert(value, where, 1)
    except NotPlainError as e:
        if losses is not None:
            raise
        raise TypeError(str(e)) from None


class _Converter:
    def __init__(self, losses: list[str] | None, most_numbers: float) -> None:
        self._losses = losses
        self._most_numbers = most_numbers

    def convert(self, value: Any, where: str, depth: int) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, str | int | float):  # also members of enumerations that are numbers or text
            return _without_subclass(value)
        if depth > _MOST_NESTED:
            raise NotPlainError(where, name_type(value), f"nested over {_MOST_NESTED} deep")
        if isinstance(value, Mapping):
            return self._convert_mapping(value, where, depth)
        if hasattr(value, "tolist") and hasattr(value, "dtype"):  # of numpy or torch, which need not be installed
            return self.convert(self._read_array(value, where), where, depth + 1)
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
            return [self.convert(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        raise NotPlainError(where, name_type(value))

    def _convert_mapping(self, value: Mapping[Any, Any], where: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        texts = [key for key in value if not isinstance(key, str)]
        if texts and self._losses is not None:
            self._losses.append(f"{where} has keys that are not text, such as {texts[0]!r:.50}: they become text")
        for key in value:
            place = f"{where}[{key!r:.100}]"
            try:
                name = _as_key(key, place)
                if name in found:
                    raise NotPlainError(place, "second value", f"whose key is {name!r:.50} in JSON")
                found[name] = self.convert(_look_up(value, key, place), place, depth + 1)
            except NotPlainError as e:
                if self._losses is None:
                    raise
                self._losses.append(str(e).removesuffix("."))
        return found

    def _read_array(self, array: Any, where: str) -> Any:
        kind = getattr(array.dtype, "kind", "f")  # torch's types have none
        if kind not in _KINDS:
            raise NotPlainError(where, name_type(array), f"of {array.dtype}, which JSON cannot hold")
        if (count := math.prod(array.shape)) > self._most_numbers:
            raise NotPlainError(where, name_type(array), f"with {count:,} numbers, which are too many for settings")
        try:
            return array.tolist()
        except (RuntimeError, NotImplementedError, TypeError) as e:  # of a tensor that is sparse, or has no values
            raise NotPlainError(where, name_type(array)) from e


def _look_up(mapping: Mapping[Any, Any], key: Any, place: str) -> Any:
    try:
        return mapping[key]
    except Exception as e:  # as of a configuration whose value is missing, or refers to a missing one
        raise NotPlainError(place, f"value that raises {name_type(e)} when it is looked up") from e


def _without_subclass(value: str | float) -> str | float:
    for plain in (str, int, float):
        if isinstance(value, plain):
            return plain.__str__(value) if plain is str else plain(value)
    raise AssertionError(value)


def _as_key(key: Any, place: str) -> str:
    plain = key if isinstance(key, str) else _Converter(None, math.inf).convert(key, place, 1)
    if isinstance(plain, str):
        return str.__str__(plain)
    if isinstance(plain, list | dict):
        raise NotPlainError(place, f"value whose key is a {name_type(key)}")
    return json.dumps(plain)
