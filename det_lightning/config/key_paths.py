"""Where a value is in a configuration: the keys that lead to it, and their lines in the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from det_lightning.errors import ConfigMistake

KeyPath = tuple[str | int, ...]


def path_text(path: KeyPath) -> str:
    """Return a path as people write it: ``bind_mounts[0].host_path``."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += f".{key}" if text else key
    return text


def leaf_paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the path of each value that is not a mapping with entries."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaf_paths(item, (*path, key))
    else:
        yield path


class SourceLines:
    """The line of each key in a file. A key from elsewhere, such as an override, has the line None."""

    def __init__(self) -> None:
        self._lines: dict[KeyPath, int | None] = {}

    def set(self, path: KeyPath, line: int | None) -> None:
        self._lines[path] = line

    def find(self, path: KeyPath) -> int | None:
        """Return the line of ``path``; for a missing key, the line of the mapping that should have it."""
        for end in range(len(path), -1, -1):
            if path[:end] in self._lines:
                return self._lines[path[:end]]
        return None

    def mistake(self, path: KeyPath, message: str) -> ConfigMistake:
        return ConfigMistake(self.find(path), path_text(path), message)
