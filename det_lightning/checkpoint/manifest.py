"""Size and checksum of every file of a checkpoint, kept in its ``metadata.json``."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import google_crc32c

from det_lightning import errors
from det_lightning.checkpoint.layout import METADATA_FILE, read_json

__all__ = ["MANIFEST_KEY", "describe_files", "find_damage", "require_unchanged"]

MANIFEST_KEY = "files"

_CHUNK_BYTES = 16 * 1024 * 1024


def describe_files(directory: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Return size and CRC-32C of every file below ``directory``, by its path from there.

    CRC-32C is the checksum that object stores report too.
    """
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return {
        name: {"bytes": (directory / name).stat().st_size, "crc32c": _checksum(directory / name)}
        for name in names
        if name != METADATA_FILE
    }


def find_damage(directory: pathlib.Path, names: list[str] | None = None) -> list[str]:
    """Compare files with what ``metadata.json`` says of them; return what differs, a sentence each.

    Args:
        directory: the checkpoint's.
        names: files to look at; by default all that are listed. Those that are not listed are passed over, and a
            checkpoint that Determined wrote lists none.

    Raises:
        IncompleteCheckpointError: ``metadata.json`` is damaged.
    """
    listed = _read_manifest(directory)
    chosen = listed if names is None else {name: listed[name] for name in names if name in listed}
    return [damage for name, entry in chosen.items() if (damage := _compare(directory, name, entry)) is not None]


def require_unchanged(directory: pathlib.Path, names: list[str]) -> None:
    """Raise if one of the files is not what ``metadata.json`` says.

    Raises:
        IncompleteCheckpointError: names every such file, and what differs.
    """
    damage = find_damage(directory, names)
    if damage:
        raise errors.IncompleteCheckpointError(
            f"The checkpoint {directory} is damaged: {'; '.join(damage)}. Use another checkpoint; or, if a file was "
            f"changed on purpose, take its entry out of {MANIFEST_KEY!r} in {METADATA_FILE}."
        )


def _read_manifest(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / METADATA_FILE
    manifest = read_json(path).get(MANIFEST_KEY, {}) if path.is_file() else {}
    if not isinstance(manifest, dict):
        raise errors.IncompleteCheckpointError(f"{path}: {MANIFEST_KEY!r} should be an object; got {manifest!r:.200}.")
    return manifest


def _compare(directory: pathlib.Path, name: str, entry: Any) -> str | None:
    path = directory / name
    if ".." in pathlib.PurePosixPath(name).parts or pathlib.PurePosixPath(name).is_absolute():
        return f"{METADATA_FILE} lists {json.dumps(name)}, which lies outside of the checkpoint"
    if not isinstance(entry, dict) or not {"bytes", "crc32c"} <= entry.keys():
        return f"{METADATA_FILE} describes {name} by {entry!r:.200}"
    try:
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{name} has {size:,} bytes in place of {entry['bytes']!r:.200}"
        found = _checksum(path)
    except OSError as e:  # such as a name that is too long
        return f"{name:.200} can not be read: {e.strerror}"
    if found != entry["crc32c"]:
        return f"{name} has the checksum {found} in place of {entry['crc32c']}"
    return None


def _checksum(path: pathlib.Path) -> str:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = google_crc32c.extend(checksum, chunk)
    return f"{checksum:08x}"
