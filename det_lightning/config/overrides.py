"""Options ``--config a.b=v`` to override a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from det_lightning.config.document import KeyPath
from det_lightning.config.length import UNITS
from det_lightning.config.section import show_value
from det_lightning.config.yaml_reader import YamlDocument
from det_lightning.errors import ConfigError, ConfigMistake

# The user's own sections: null is a value there, and epochs an ordinary name.
_FREE = ("hyperparameters", "data")
# A mapping here abbreviates a list with a single element.
_LISTS = {("bind_mounts",)}


def with_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a configuration with some values replaced; ``data`` stays unchanged.

    Each override is ``a.b=v``, with ``v`` in YAML. ``x,y`` is a list of two. A mapping is merged with the old mapping,
    unless the mapping is a length; null removes the old value. Raises a ConfigError with all mistakes.
    """
    merged = dict(data)
    for path, value in read_overrides(overrides):
        for key in reversed(path):
            value = {key: value}
        merged = _merge(merged, value, is_free=path[0] in _FREE)
    return merged


def read_overrides(overrides: Sequence[str]) -> list[tuple[KeyPath, Any]]:
    """Return the path and value of each override; raise a ConfigError with all mistakes."""
    mistakes: list[ConfigMistake] = []
    found: list[tuple[KeyPath, Any]] = []
    for override in overrides:
        name, sign, text = override.partition("=")
        path = tuple(name.strip().split("."))
        if not sign or "" in path:
            message = f"must be name=value, with dots in name; got {show_value(override)}"
            mistakes.append(ConfigMistake(None, "", message))
            continue
        value = _value(text, name, mistakes)
        found.append((path, [value] if path in _LISTS and not isinstance(value, list) else value))
    if mistakes:
        raise ConfigError("--config", mistakes)
    return found


def _value(text: str, name: str, mistakes: list[ConfigMistake]) -> Any:
    if "," in text and not text.startswith(("[", "{")):
        return [_value(part, name, mistakes) for part in text.split(",")]
    document = YamlDocument(text)
    mistakes.extend(ConfigMistake(None, name, mistake.message) for mistake in document.mistakes)
    for path in document.without_value:
        if path:  # the whole value may be empty
            advice = "write a space after the colon" if ":" in str(path[-1]) else "set a value, or null"
            mistakes.append(ConfigMistake(None, name, f"the key {show_value(path[-1])} has no value: {advice}"))
    return document.data


def _merge(old: Mapping[str, Any], new: Mapping[str, Any], *, is_free: bool) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        if value is None and not is_free:
            merged.pop(key, None)
            continue
        # Another unit replaces the old one.
        is_length = not is_free and isinstance(value, Mapping) and bool(value) and value.keys() <= set(UNITS)
        if isinstance(before, Mapping) and isinstance(value, Mapping) and not is_length:
            value = _merge(before, value, is_free=is_free)
        merged[key] = value
    return merged
