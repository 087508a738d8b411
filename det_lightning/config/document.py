"""A configuration as written: values, paths of keys, lines, and mistakes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from det_lightning.errors import ConfigMistake

KeyPath = tuple[str | int, ...]


def path_text(path: KeyPath) -> str:
    """Return a path in the usual spelling: ``bind_mounts[0].host_path``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def leaf_paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the path of each value other than a mapping with entries."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaf_paths(item, (*path, key))
    else:
        yield path


class SourceLines(dict[KeyPath, int | None]):
    """The line of each key in a file; None for a key from elsewhere, such as an override."""

    def find(self, path: KeyPath) -> int | None:
        """Return the line of ``path``, or for a missing key the line of the mapping around the key."""
        known = (path[:end] for end in range(len(path), -1, -1) if path[:end] in self)
        return self.get(next(known, path))

    def mistake(self, path: KeyPath, message: str) -> ConfigMistake:
        return ConfigMistake(self.find(path), path_text(path), message)


@dataclasses.dataclass(repr=False)  # secrets
class Document:
    """The content of a configuration, with all findings from reading."""

    data: Any  # dicts with string keys, lists, strings, finite numbers, booleans and None; None if unreadable
    name: str = "the configuration"  # in messages
    lines: SourceLines = dataclasses.field(default_factory=SourceLines)
    mistakes: list[ConfigMistake] = dataclasses.field(default_factory=list)
    #: Values read differently than written.
    notes: list[ConfigMistake] = dataclasses.field(default_factory=list)
    #: Unknown keys, where unknown keys are left out.
    unknown: list[ConfigMistake] = dataclasses.field(default_factory=list)

    def find_parent(self, path: KeyPath) -> Any:
        """Return the mapping or list that holds the last key of a path."""
        return functools.reduce(lambda parent, key: parent[key], path[:-1], self.data)
