"""What is wrong with a place that is no checkpoint or no storage, and where checkpoints are instead.

They are looked for one or two levels below a directory, with few requests.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR
from det_lightning.checkpoint.storage.location import Location, explain_errors, is_own_id
from det_lightning.checkpoint.storage.metadata import markers_of
from det_lightning.checkpoint.storage.parallel import in_parallel
from det_lightning.escaping import escape, name_some
from det_lightning.masking import mask_url, short_text

_Listing = tuple[Location, Mapping[str, str]]

# How many directories are listed at most. A request takes a thousand times longer than a look at a disk.
_MOST_LISTED_REMOTELY = 200
_MOST_LISTED_LOCALLY = 4000
# How many are listed at once. Below, so many with the names of checkpoints show whether they are some.
_AT_ONCE = 8


def is_checkpoint(directory: Location, types: Mapping[str, str] | None = None) -> bool:
    """Return whether a directory has a file of a checkpoint, given the types of its entries if they are known."""
    types = directory.list_types() if types is None else types
    for marker in markers_of(complete=False):
        first, _, rest = marker.partition("/")
        if first in types and ((directory / marker).exists() if rest else types[first] == "file"):
            return True
    return False


def find_storages(root: Location) -> dict[str, Location]:
    """Return a directory's path with one of its checkpoints, or those of the storages one and two levels below it.

    The number of directories that are looked into is limited, so some storages below may be missing.
    """
    most = _MOST_LISTED_LOCALLY if root.is_local else _MOST_LISTED_REMOTELY
    with explain_errors("looking for checkpoints in", root):
        ids, others = _subdirectories((root, root.list_types()))
        children = [*ids, *others][: most // 2]
        level: list[_Listing] = []
        for first in range(0, len(children), _AT_ONCE):
            listings = _list_all(root, children[first : first + _AT_ONCE])
            if (one := next((child for child, types in listings if is_checkpoint(child, types)), None)) is not None:
                return {root.path: one}
            level += listings
        return _find_below(root, level, most // 4)


def _find_below(root: Location, level: list[_Listing], most: int) -> dict[str, Location]:
    """Return the storages among listed directories, and among those in them, of which at most ``most`` are listed."""
    found: dict[str, Location] = {}
    for _ in range(2):
        share = max(1, most // max(1, len(level)))
        sorted_out = [_subdirectories(listing) for listing in level]
        chosen = [child for ids, others in sorted_out for child in [*ids[:_AT_ONCE], *others][:share]]
        level = []
        for child, types in _list_all(root, chosen[:most]):
            if is_checkpoint(child, types):
                found.setdefault(child.parent.path, child)
            else:
                level.append((child, types))
    return found


def explain_absence(root: Location, storages: Mapping[str, Location]) -> str:
    """Return a message that a directory holds no checkpoints, with the storages below it that do."""
    if not storages:
        return f"{escape(root)} holds no checkpoints."
    shown = [f"{escape(one.parent)} (such as {escape(one.name)})" for one in storages.values()]
    return f"{escape(root)} holds no checkpoints itself. There are checkpoints below it, in {name_some(shown)}."


def find_wrong_directory(root: Location) -> str | None:
    """Return what is wrong with a directory that holds no checkpoint; None if it may well hold none yet."""
    with explain_errors("looking for", root):
        if not root.is_dir():
            return f"The directory {escape(root)} does not exist."
    storages = find_storages(root)
    return explain_absence(root, storages) if storages and root.path not in storages else None


def require_checkpoint(directory: Location) -> None:
    """Raise a CheckpointNotFound if a directory is no checkpoint, but holds some, or storages do below it."""
    with explain_errors("looking into", directory):
        if is_checkpoint(directory):
            return
    storages = find_storages(directory)
    if directory.path in storages:
        raise errors.CheckpointNotFound(
            f"{escape(directory)} is not a checkpoint but holds some: name one of them, such as "
            f"{escape(storages[directory.path])}. CheckpointStorage({str(directory)!r}).newest() returns the newest."
        )
    if storages:
        raise errors.CheckpointNotFound(explain_absence(directory, storages))


def require_path(value: Any, expected: str) -> None:
    """Raise a TypeError that says what is expected unless a value is a path or the text of one."""
    if not (isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str)):
        raise TypeError(f"{expected}; got {short_text(value)}.")


def require_checkpoint_path(value: Any) -> None:
    """Raise a TypeError unless a value can name a checkpoint."""
    expected = "A checkpoint is named by its id, path or URL"
    if hasattr(value, "newest"):
        raise TypeError(f"{expected}; got the storage {escape(value)}, whose newest() is the newest one in it.")
    if value is None:
        expected += ", and CheckpointStorage.newest() returns None where there is no checkpoint"
    require_path(value, expected)


def describe_unknown(name: str, root: Location, known: Sequence[str]) -> errors.CheckpointNotFound:
    """Return the error for a name that is no checkpoint in a storage with the ``known`` ids; it names similar ids."""
    near = difflib.get_close_matches(name.rstrip("/").rpartition("/")[2], known, n=3, cutoff=0.3)
    hint = f"Similar ids: {', '.join(map(escape, near))}." if near else f"{len(known)} other checkpoints are there."
    return errors.CheckpointNotFound(
        f"There is no checkpoint {mask_url(name)!r}, neither as a directory nor as an id in {escape(root)}. {hint}"
    )


def _subdirectories(listing: _Listing) -> tuple[list[Location], list[Location]]:
    """Return the directories in a directory: those whose names are ids of checkpoints, and the others."""
    directory, types = listing
    names = [name for name, kind in sorted(types.items()) if kind == "directory" and name != BOOKKEEPING_DIR]
    ids = [directory / name for name in names if is_own_id(name)]
    return ids, [directory / name for name in names if not is_own_id(name)]


def _list_all(root: Location, directories: list[Location]) -> list[_Listing]:
    return list(zip(directories, in_parallel(root, _list_readable, directories), strict=True))


def _list_readable(directory: Location) -> dict[str, str]:
    try:
        return directory.list_types()
    except OSError:  # this user may not look into it
        return {}
