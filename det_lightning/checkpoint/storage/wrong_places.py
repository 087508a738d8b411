"""Messages about a place that is no checkpoint or no storage, with the nearest checkpoints below.

The search goes one or two levels below a directory, with few requests.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR
from det_lightning.checkpoint.storage.location import Location, explain_errors, is_own_id
from det_lightning.checkpoint.storage.metadata import call_in_parallel, list_markers
from det_lightning.escaping import escape, name_some
from det_lightning.masking import mask_url, short_text

_Listing = tuple[Location, Mapping[str, str]]

# How many directories are listed at most. A request takes a thousand times longer than a look at a disk.
_MOST_LISTED_REMOTELY = 200
_MOST_LISTED_LOCALLY = 4000
# Below the place itself, so many directories with the names of checkpoints show whether they are checkpoints.
_MOST_IDS = 8


def is_checkpoint(directory: Location, types: Mapping[str, str] | None = None) -> bool:
    """Return whether a directory has a file of a checkpoint, given the types of the entries if known."""
    types = directory.list_types() if types is None else types
    for marker in list_markers(complete=False):
        first, _, rest = marker.partition("/")
        if first in types and ((directory / marker).exists() if rest else types[first] == "file"):
            return True
    return False


def find_storages(root: Location) -> dict[str, Location]:
    """Return a checkpoint of the storage at ``root``, or of each storage one and two levels below, by storage path.

    The number of listed directories is limited, so some storages below may be missing.
    """
    most = _MOST_LISTED_LOCALLY if root.is_local else _MOST_LISTED_REMOTELY
    with explain_errors("looking for checkpoints in", root):
        top: _Listing = (root, root.list_types())
        # A few requests show that a large bucket is a storage.
        few = _list_all(root, _choose_subdirectories(top, most)[:_MOST_IDS])
        found = {child.parent.path: child for child, types in reversed(few) if is_checkpoint(child, types)}
        level = [top]
        for limit, most_ids in ((most // 2, most), (most // 4, _MOST_IDS), (most // 4, _MOST_IDS)):
            if root.path in found:
                break
            share = max(1, limit // max(1, len(level)))
            chosen = [child for listing in level for child in _choose_subdirectories(listing, most_ids)[:share]]
            listings = _list_all(root, chosen[:limit])
            checkpoints = [child for child, types in listings if is_checkpoint(child, types)]
            found.update({checkpoint.parent.path: checkpoint for checkpoint in reversed(checkpoints)})
            level = [listing for listing in listings if listing[0] not in checkpoints]
    return found


def explain_absence(root: Location, storages: Mapping[str, Location]) -> str:
    """Return a message that a directory holds no checkpoints, with the storages below."""
    if not storages:
        return f"{escape(root)} holds no checkpoints."
    shown = [f"{escape(one.parent)} (such as {escape(one.name)})" for one in storages.values()]
    return f"{escape(root)} holds no checkpoints itself. There are checkpoints below, in {name_some(shown)}."


def find_wrong_directory(root: Location) -> str | None:
    """Return a sentence about a directory that is no storage; None for one that may well hold no checkpoint yet."""
    with explain_errors("looking for", root):
        if not root.is_dir():
            return f"The directory {escape(root)} does not exist."
    storages = find_storages(root)
    return explain_absence(root, storages) if storages and root.path not in storages else None


def require_checkpoint(directory: Location) -> None:
    """Raise a CheckpointNotFound for a directory that is no checkpoint, but has some below."""
    with explain_errors("looking into", directory):
        if is_checkpoint(directory):
            return
    storages = find_storages(directory)
    if directory.path in storages:
        raise errors.CheckpointNotFound(
            f"{escape(directory)} is a directory of checkpoints, not a checkpoint: name a checkpoint, such as "
            f"{escape(storages[directory.path])}. CheckpointStorage({str(directory)!r}).newest() returns the newest."
        )
    if storages:
        raise errors.CheckpointNotFound(explain_absence(directory, storages))


def require_checkpoint_path(value: Any) -> None:
    """Raise a TypeError unless a value can name a checkpoint."""
    expected = "A checkpoint must be named by its id, path or URL"
    if hasattr(value, "newest"):
        raise TypeError(f"{expected}; got the storage {escape(value)}, whose newest() returns a checkpoint.")
    if value is None:
        expected += ", and CheckpointStorage.newest() returns None where there is no checkpoint"
    if not (isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str)):
        raise TypeError(f"{expected}; got {short_text(value)}.")


def describe_unknown(name: str, root: Location, known: Sequence[str]) -> errors.CheckpointNotFound:
    """Return the error for an unknown name in a storage with the ``known`` ids; the message names similar ids."""
    near = difflib.get_close_matches(name.rstrip("/").rpartition("/")[2], known, n=3, cutoff=0.3)
    hint = f"Similar ids: {', '.join(map(escape, near))}." if near else f"{len(known)} other checkpoints are there."
    return errors.CheckpointNotFound(
        f"There is no checkpoint {mask_url(name)!r}, neither as a directory nor as an id in {escape(root)}. {hint}"
    )


def _choose_subdirectories(listing: _Listing, most_ids: int) -> list[Location]:
    """Return the directories in a directory: first a few named like checkpoints, then the others."""
    directory, types = listing
    names = [name for name, kind in sorted(types.items()) if kind == "directory" and name != BOOKKEEPING_DIR]
    ids = [name for name in names if is_own_id(name)]
    return [directory / name for name in [*ids[:most_ids], *(name for name in names if not is_own_id(name))]]


def _list_all(root: Location, directories: list[Location]) -> list[_Listing]:
    return list(zip(directories, call_in_parallel(root, _list_readable, directories), strict=True))


def _list_readable(directory: Location) -> dict[str, str]:
    try:
        return directory.list_types()
    except OSError:  # this user may not look into it
        return {}
