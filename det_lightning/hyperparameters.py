"""Chooses a value for each hyperparameter where no search does, and gives values the form that trials see."""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["choose_hparams", "convert_like_master", "explain_texts", "find_ranges", "flatten"]

# From here on Go writes exponents, and Python reads floats.
_SMALLEST_WITH_EXPONENT = 1e21
# Larger integers are floats in Go's JSON, with as few digits as are needed to tell two floats apart.
_LARGEST_EXACT = 2**53
_LARGEST = 1e308


def convert_like_master(value: Any) -> Any:
    """Return a copy of a value as Determined's master passes it on: in Go's JSON ``64.0`` is ``64``."""
    if isinstance(value, Mapping):
        return {name: convert_like_master(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [convert_like_master(item) for item in value]
    if isinstance(value, int) and _LARGEST_EXACT < abs(value) < _LARGEST:
        value = float(value)
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _SMALLEST_WITH_EXPONENT
    return int(decimal.Decimal(float.__repr__(value))) if is_whole else value


def choose_hparams(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value for each hyperparameter of a configuration; raise a ValueError naming all unreadable entries.

    A constant gives the value, ``categorical`` the first value, and a range the middle, for ``log`` the middle of the
    exponents.
    """
    entries = config.get("hyperparameters") or {}
    mistakes: list[str] = []
    hparams: dict[str, Any] = _values(entries, "", mistakes)
    if mistakes:
        raise ValueError("hyperparameters of the configuration: " + "; ".join(mistakes) + ".")
    return hparams


def flatten(hparams: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested hyperparameters by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in hparams.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


_ABOUT_TEXT = re.compile(r"\bstr\b")
_TEXTS = "These hyperparameters are texts:"
_LIKE_NUMBER = re.compile(r"\s*[-+]?\.?\d")


def explain_texts(error: TypeError, hparams: Mapping[str, Any] | None) -> None:
    """If an error is about text, name the hyperparameters that are text but begin like numbers, such as ``"1e-2x"``."""
    given = flatten(hparams or {})
    texts = {name: value for name, value in given.items() if isinstance(value, str) and _LIKE_NUMBER.match(value)}
    if texts and _ABOUT_TEXT.search(str(error)) and _TEXTS not in str(error):
        listed = ", ".join(f"{name}={value!r}" for name, value in texts.items())
        error.args = (f"{error}. {_TEXTS} {listed}. Write numbers without quotes, such as 0.01 or 1e-2.",)


def find_ranges(hparams: Mapping[Any, Any], where: str = "hparams") -> list[str]:
    """Return where hyperparameters hold a part of a search space, such as a range, instead of a value."""
    found = []
    for name, value in hparams.items():
        if isinstance(value, Mapping):
            here = f"{where}[{name!r}]"
            kind = value.get("type")
            is_range = isinstance(kind, str) and kind in _KINDS and value.keys() >= _KINDS[kind][0]
            found += [here] if is_range else find_ranges(value, here)
    return found


def _values(entries: Mapping[str, Any], prefix: str, mistakes: list[str]) -> dict[str, Any]:
    return {name: _value(entry, f"{prefix}{name}", mistakes) for name, entry in entries.items()}


def _value(entry: Any, name: str, mistakes: list[str]) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    kind = entry.get("type")
    if not isinstance(kind, str):
        return _values(entry, f"{name}.", mistakes)
    try:
        return _KINDS[kind][1](entry)
    except KeyError as e:
        known = ", ".join(_KINDS)
        lacks = f"has the unknown type {kind!r} (known are {known})" if kind not in _KINDS else f"lacks {e}"
        mistakes.append(f"{name} {lacks}")
    except (TypeError, IndexError, ValueError, OverflowError) as e:
        mistakes.append(f"{name} cannot be read: {e}")
    return None


def _middle(entry: Any) -> float:
    return (float(entry["minval"]) + float(entry["maxval"])) / 2


_RANGE = {"minval", "maxval"}
# The keys of an entry of a search space, to tell nested hyperparameters with a "type" apart, and the chosen value.
_KINDS: dict[str, tuple[set[str], Callable[[Any], Any]]] = {
    "const": ({"val"}, lambda entry: entry["val"]),
    "int": (_RANGE, lambda entry: (int(entry["minval"]) + int(entry["maxval"])) // 2),
    "double": (_RANGE, _middle),
    "log": (_RANGE, lambda entry: float(entry.get("base", 10.0)) ** _middle(entry)),
    "categorical": ({"vals"}, lambda entry: entry["vals"][0]),
}
