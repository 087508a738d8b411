"""Finds the storage or checkpoint that a path or URL on the command line names."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import CODE_DIR, STATE_FILES
from det_lightning.checkpoint.storage.checkpoint_info import find_first, is_checkpoint
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage, open_checkpoint, resolve_storage
from det_lightning.checkpoint.storage.location import Location, explain_errors
from det_lightning.cli.output import show_progress, warn
from det_lightning.escaping import escape

_EXPECTED = "Checkpoints are directories with a metadata.json, directly below the storage."


def open_storage(url: str, options: Mapping[str, Any]) -> CheckpointStorage:
    """Return the storage at ``url``; raise if there are neither checkpoints nor links, or ``url`` is a checkpoint."""
    storage = CheckpointStorage(url, options=options)
    with explain_errors(f"looking for {storage}"):
        if not storage.root.is_dir():
            storage.root.exists()  # raises where gcsfs is refused access, which is_dir() takes for an absence
            raise errors.StorageError(f"There is no directory {storage}, or nothing is in it.")
        if is_checkpoint(storage.root):
            raise errors.StorageError(f"{storage} is a checkpoint; name the storage that holds the checkpoint.")
    if not _holds_checkpoints(storage) and not storage.list_links():
        raise errors.StorageError(f"{storage} holds no checkpoints. {_EXPECTED}")
    return storage


def locate_checkpoint(url: str, options: Mapping[str, Any]) -> Location:
    """Return the location of the checkpoint at ``url``; otherwise raise an error that says what is there."""
    location, ids = _locate(url, options)
    if not ids:
        return location
    raise errors.CheckpointNotFound(
        f"{location} is a directory of {len(ids)} checkpoints, not a checkpoint: name a checkpoint, such as "
        f"{location / ids[0]}."
    )


def locate_checkpoints(url: str, options: Mapping[str, Any]) -> list[Location]:
    """Return the location of the checkpoint at ``url``, or of all in the storage at ``url``, complete or not."""
    location, ids = _locate(url, options)
    return [location / checkpoint_id for checkpoint_id in ids] or [location]


def _locate(url: str, options: Mapping[str, Any]) -> tuple[Location, list[str]]:
    """Return the location of a checkpoint, or of a storage with the ids of its checkpoints; otherwise raise."""
    location = _existing(url, options)
    with explain_errors(f"looking into {location}"):
        if is_checkpoint(location):
            return location, []
    storage = CheckpointStorage(url, options=options)
    if ids := storage.list_ids(complete=False):
        return location, ids
    raise errors.CheckpointNotFound(
        f"{location} holds no checkpoints, and is not a checkpoint: {' and '.join(STATE_FILES)} are missing. "
        f"{_EXPECTED}"
    )


def _holds_checkpoints(storage: CheckpointStorage) -> bool:
    with explain_errors(f"looking into {storage}"):
        # Usually the first is a checkpoint, and shows that a large bucket is a storage.
        first = find_first(storage.root, storage.root.list_names())
        return first is not None or bool(storage.list_ids(complete=False))


def list_sizes(checkpoint: Location) -> dict[str, int]:
    """Return the size in bytes of each file of a checkpoint, by path relative to the checkpoint."""
    with explain_errors(f"reading {checkpoint}"):
        return {name: int(info.get("size") or 0) for name, info in sorted(checkpoint.find_files().items())}


@contextlib.contextmanager
def open_local(checkpoint: Location, options: Mapping[str, Any], *, with_code: bool = False) -> Iterator[pathlib.Path]:
    """Yield a checkpoint as a local directory, with a progress bar for a download; errors name the checkpoint."""
    with contextlib.ExitStack() as stack:
        if checkpoint.is_local:
            directory = checkpoint.local_path
        else:
            sizes = list_sizes(checkpoint)
            total = sum(size for name, size in sizes.items() if with_code or not name.startswith(f"{CODE_DIR}/"))
            with show_progress(f"Reading {checkpoint.name}", total) as progress:
                opening = open_checkpoint(checkpoint.url, options, with_code=with_code, progress=progress)
                directory = stack.enter_context(opening)
        try:
            yield directory
        except errors.CheckpointError as e:
            raise type(e)(name_checkpoint(checkpoint, directory, str(e))) from e


def name_checkpoint(checkpoint: Location, directory: pathlib.Path, text: str) -> str:
    """Return a message with ``checkpoint`` in place of ``directory``, and unprintable characters escaped."""
    for name in (str(directory), escape(directory)):
        text = text.replace(name, escape(checkpoint))
    return text


def _find_id(name: str) -> Location | None:
    """Return the only checkpoint with this id in the experiments of this directory or in the default storage."""
    if "/" in name or ":" in name:
        return None
    folders = [*pathlib.Path("experiments").glob("*/checkpoints"), pathlib.Path("checkpoints")]
    folders.append(pathlib.Path(str(resolve_storage(None, {})[0])))
    found = [folder / name for folder in folders if (folder / name).is_dir()]
    if len(found) > 1:
        raise errors.CheckpointNotFound(f"There are {len(found)} checkpoints {name}: {', '.join(map(str, found))}.")
    if not found:
        return None
    warn(f"note: {name} is {found[0]}")
    return Location.parse(str(found[0]), {})


def _existing(url: str, options: Mapping[str, Any]) -> Location:
    location = Location.parse(url, options)
    with explain_errors(f"looking for {location}"):
        if location.is_dir():
            return location
    if found := _find_id(url):
        return found
    parent, _, name = location.path.rpartition("/")
    if not parent:
        raise errors.CheckpointNotFound(f"There is no checkpoint {location}.")
    # The storage's error lists similar names.
    storage = CheckpointStorage(dataclasses.replace(location, path=parent).url, options=options)
    return Location.parse(storage.find(name), options)
