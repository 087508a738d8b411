"""Checksums of files: the manifest in ``metadata.json``, the comparison with the files, links that lead out, SHA-256.

Determined's checkpoints have no manifest, and earlier det_lightning releases wrote no checksum of the entries. Without
a checksum nothing is compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastcrc.crc32 import iscsi as extend_crc32c

from det_lightning import errors
from det_lightning.checkpoint.format.layout import CODE_DIR, FILES_READ, METADATA_FILE, read_json
from det_lightning.escaping import get_logger
from det_lightning.files.plain_values import as_plain
from det_lightning.files.strict_json import spell_numbers

logger = get_logger(__name__)

#: Entries of ``metadata.json``: the manifest, and the checksum of all other entries.
MANIFEST_KEY = "files"
CHECKSUM_KEY = "metadata_crc32c"

_CHUNK_BYTES = 1024 * 1024


def describe_files(directory: pathlib.Path, known: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return size and CRC-32C (the checksum of object stores) of every file below ``directory``, by relative path.

    Files in ``known`` keep the description given there and are not read.
    """
    found = dict(known)
    for folder, _, names in os.walk(directory, onerror=_raise):
        for path in map(pathlib.Path(folder).joinpath, names):
            name = path.relative_to(directory).as_posix()
            if name != METADATA_FILE and name not in found and path.is_file():
                found[name] = describe_file(path)
    return dict(sorted(found.items()))


def describe_file(path: pathlib.Path) -> dict[str, Any]:
    """Return size and CRC-32C of a file."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = extend_crc32c(chunk, checksum)
    return {"bytes": path.stat().st_size, "crc32c": f"{checksum:08x}"}


def describe_content(content: bytes) -> dict[str, Any]:
    """Return size and CRC-32C of a file with this content."""
    return {"bytes": len(content), "crc32c": f"{extend_crc32c(content):08x}"}


def _raise(error: OSError) -> None:
    raise error


def with_checksum(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``metadata.json`` as strict JSON, with a checksum of all entries.

    Entries that JSON cannot hold are left out, and a warning names each.
    """
    try:
        entries = json.loads(json.dumps(metadata, allow_nan=False))  # in the form in which they will be read
    except (TypeError, ValueError):
        losses: list[str] = []
        entries = spell_numbers(as_plain(metadata, METADATA_FILE, losses))
        if losses:
            logger.warning("The checkpoint cannot hold all values: %s.", "; ".join(losses))
    return {**entries, CHECKSUM_KEY: _checksum_of_entries(entries)}


def with_entries(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``metadata`` with entries added or replaced, and with a new checksum if there was one before."""
    content = {name: value for name, value in metadata.items() if name != CHECKSUM_KEY} | {**entries}
    return with_checksum(content) if CHECKSUM_KEY in metadata else dict(spell_numbers(content))


def find_metadata_damage(metadata: Mapping[str, Any]) -> str | None:
    """Describe how the entries of ``metadata.json`` differ from their checksum; None if nothing differs."""
    if CHECKSUM_KEY not in metadata:
        return None
    expected = metadata[CHECKSUM_KEY]
    try:
        found = _checksum_of_entries({name: value for name, value in metadata.items() if name != CHECKSUM_KEY})
    except (RecursionError, ValueError):  # more deeply nested, or with larger numbers, than is ever written
        return f"{METADATA_FILE} holds values that are never written there"
    if found == expected:
        return None
    return f"the entries of {METADATA_FILE} have the checksum {found} in place of {expected!r:.200}"


def find_damage(directory: pathlib.Path, names: Sequence[str] | None = None) -> list[str]:
    """Compare files with the manifest, and describe each difference.

    ``names`` defaults to all listed files. Unlisted files are skipped; Determined's checkpoints list none.
    """
    metadata = _read_metadata(directory)
    listed = metadata.get(MANIFEST_KEY, {})
    chosen = listed if names is None else {name: listed[name] for name in names if name in listed}
    found = [find_metadata_damage(metadata), *(_compare(directory, name, entry) for name, entry in chosen.items())]
    return [damage for damage in found if damage is not None]


def require_unchanged(directory: pathlib.Path, names: Sequence[str]) -> None:
    """Raise an ``IncompleteCheckpointError`` that names all differences, unless the files match the manifest."""
    damage = find_damage(directory, names)
    if damage:
        raise errors.IncompleteCheckpointError(
            f"The checkpoint {directory} is damaged: {'; '.join(damage)}. Use another checkpoint. If you changed the "
            f"files on purpose, remove {MANIFEST_KEY!r} and {CHECKSUM_KEY!r} from {METADATA_FILE}, which ends the "
            "comparison."
        )


def leads_out(directory: pathlib.Path, path: pathlib.Path) -> bool:
    """Return whether a file or directory in ``directory`` is a link to a target outside."""
    return path.is_symlink() and not _find_target(path).is_relative_to(directory.resolve())


def require_inside(directory: pathlib.Path) -> None:
    """Raise an ``UnsafeCheckpointError`` that names each link from the checkpoint in ``directory`` to a target outside.

    ``directory`` may be a link itself. ``code/`` is not searched: no link in there is ever followed.
    """
    found = []
    for folder, folders, files in os.walk(directory):
        if pathlib.Path(folder) == directory and CODE_DIR in folders:
            folders.remove(CODE_DIR)
        for path in (pathlib.Path(folder, name) for name in sorted([*folders, *files])):
            if leads_out(directory, path):
                found.append(f"{path} is a link to {_find_target(path)}")
    if found:
        raise errors.UnsafeCheckpointError(
            f"{'; '.join(found):.2000}: nothing is read through a link that leads out of the checkpoint. Replace the "
            "link by a copy of the target."
        )


def _find_target(link: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(os.path.realpath(link))  # unlike resolve(), also of links that lead to one another


def find_unlisted(directory: pathlib.Path) -> list[str]:
    """Return the paths of files, among the files to read and in ``code/``, that the manifest does not list."""
    listed = _read_metadata(directory).get(MANIFEST_KEY)
    if listed is None:
        return []
    present = [name for name in FILES_READ if os.path.lexists(directory / name)]
    return [name for name in (*present, *_paths_in_code(directory)) if name not in listed]


def split_code(directory: pathlib.Path, *, trusted: bool) -> tuple[list[str], list[str]]:
    """Return the paths of the files in ``code/`` that may be imported, and the paths of everything else there.

    A file may be imported if the manifest lists the file, or if there is no manifest. Unless ``trusted``,
    :func:`require_unchanged` raises for a changed file. Links are not followed.
    """
    listed = _read_metadata(directory).get(MANIFEST_KEY)
    if not trusted:
        require_unchanged(directory, [name for name in listed or () if name.startswith(f"{CODE_DIR}/")])
    present = _paths_in_code(directory)
    usable = [name for name, is_file in present.items() if is_file and (listed is None or name in listed)]
    return usable, sorted(present.keys() - {*usable})


def _paths_in_code(directory: pathlib.Path) -> dict[str, bool]:
    """Return the paths in ``code/``, without directories, and whether each is a regular file."""
    code = directory / CODE_DIR
    if code.is_symlink():
        return {CODE_DIR: False}
    found = {}
    for folder, folders, files in os.walk(code):
        for path in (pathlib.Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink() or not path.is_dir():
                found[path.relative_to(directory).as_posix()] = path.is_file() and not path.is_symlink()
    return dict(sorted(found.items()))


def _read_metadata(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / METADATA_FILE
    metadata = read_json(path) if path.is_file() else {}
    manifest = metadata.get(MANIFEST_KEY, {})
    if not isinstance(manifest, dict):
        raise errors.IncompleteCheckpointError(f"{path}: {MANIFEST_KEY!r} must be an object; got {manifest!r:.200}.")
    return metadata


def _compare(directory: pathlib.Path, name: str, entry: Any) -> str | None:
    path = directory / name
    relative = pathlib.PurePosixPath(name)
    shown = f"{METADATA_FILE} lists {json.dumps(name):.200}"
    if ".." in relative.parts or relative.is_absolute():
        return f"{shown}, which lies outside of the checkpoint"
    if str(relative) != name:  # the same file could be listed, and read, any number of times
        return f"{shown}, which is not the plain path of a file"
    if not isinstance(entry, dict) or not {"bytes", "crc32c"} <= entry.keys():
        return f"{METADATA_FILE} describes {name} by {entry!r:.200}"
    try:
        if _leads_through_link(directory, name):
            return f"{name} is a link"
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{name} has {size:,} bytes in place of {entry['bytes']!r:.200}"
        found = describe_file(path)["crc32c"]
    except OSError as e:  # such as a name that is too long
        return f"{name:.200} cannot be read: {e.strerror}"
    if found != entry["crc32c"]:
        return f"{name} has the checksum {found} in place of {entry['crc32c']!s:.200}"
    return None


def _leads_through_link(directory: pathlib.Path, name: str) -> bool:
    """Return whether a file of ``code/`` is a link, or lies behind a link; other files may be links."""
    path = pathlib.PurePosixPath(name)
    if path.parts[:1] != (CODE_DIR,):
        return False
    return any((directory / part).is_symlink() for part in (path, *path.parents) if part.name)


def _checksum_of_entries(entries: Mapping[str, Any]) -> str:
    content = json.dumps(entries, sort_keys=True, separators=(",", ":"))
    return f"{extend_crc32c(content.encode('ascii')):08x}"


def digest_file(path: pathlib.Path) -> str:
    """Return the SHA-256 of a file, which, unlike a checksum, nobody can forge."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
