"""From what the command line names to a storage, or to a checkpoint's directory on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import CODE_DIR, LOAD_DATA_FILE, METADATA_FILE, STATE_FILES
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import Location, explain_errors
from det_lightning.checkpoint.storage.transfer import open_checkpoint
from det_lightning.cli.output import show_progress
from det_lightning.escaping import escape

__all__ = ["find_checkpoint", "find_checkpoints", "list_sizes", "open_storage", "opened", "with_name_of"]

_MARKERS = (METADATA_FILE, LOAD_DATA_FILE, *STATE_FILES)


def open_storage(url: str, options: Mapping[str, Any]) -> CheckpointStorage:
    """Return the storage at ``url``.

    Raises:
        StorageError: it can not be reached, or nothing is there.
    """
    storage = CheckpointStorage(url, options=options)
    with explain_errors(f"looking for {escape(storage)}"):
        if not storage.root.is_dir():
            raise errors.StorageError(f"There is no directory {escape(storage)}, or nothing is in it.")
        if _is_checkpoint(storage.root):
            raise errors.StorageError(f"{escape(storage)} is a checkpoint; name the directory that holds it.")
    return storage


def find_checkpoint(url: str, options: Mapping[str, Any]) -> Location:
    """Return where the checkpoint at ``url`` is.

    Raises:
        CheckpointNotFound: there is none; says what is there instead.
        StorageError: the place can not be reached.
    """
    place = _existing(url, options)
    if not _is_checkpoint(place):
        held = CheckpointStorage(url, options=options).list_ids(complete=False)
        raise errors.CheckpointNotFound(
            f"{escape(place)} is no checkpoint, but a directory of {len(held)}: name one of them, such as "
            f"{escape(place / held[0])}."
            if held
            else f"{escape(place)} holds no checkpoint: {' and '.join(STATE_FILES)} are missing."
        )
    return place


def find_checkpoints(url: str, options: Mapping[str, Any]) -> list[Location]:
    """Return where the checkpoint at ``url`` is, or those in the storage at ``url``, complete or not.

    Raises:
        CheckpointNotFound: there is none.
        StorageError: the place can not be reached.
    """
    place = _existing(url, options)
    if _is_checkpoint(place):
        return [place]
    held = CheckpointStorage(url, options=options).list_ids(complete=False)
    if not held:
        raise errors.CheckpointNotFound(f"{escape(place)} is no checkpoint, and holds none.")
    return [place / checkpoint_id for checkpoint_id in held]


def list_sizes(place: Location) -> dict[str, int]:
    """Return the size of every file of a checkpoint in bytes, by its path in there.

    Raises:
        StorageError: the storage can not be read.
    """
    with explain_errors(f"reading {escape(place)}"):
        return {name: int(info.get("size") or 0) for name, info in sorted(place.find_files().items())}


@contextlib.contextmanager
def opened(place: Location, options: Mapping[str, Any], *, with_code: bool = False) -> Iterator[pathlib.Path]:
    """Give a checkpoint as a local directory; see ``open_checkpoint``. Shows how far its transfer has come.

    Errors name the place itself, not that of the copy.
    """
    with contextlib.ExitStack() as stack:
        if place.is_local:
            directory = place.local_path
        else:
            sizes = list_sizes(place)
            total = sum(size for name, size in sizes.items() if with_code or not name.startswith(f"{CODE_DIR}/"))
            with show_progress(f"Reading {place.name}", total) as progress:
                opening = open_checkpoint(place.url, options, with_code=with_code, progress=progress)
                directory = stack.enter_context(opening)
        try:
            yield directory
        except errors.CheckpointError as e:
            raise type(e)(with_name_of(place, directory, str(e))) from e


def with_name_of(place: Location, directory: pathlib.Path, text: str) -> str:
    """Return a message about ``directory`` with the name of ``place`` in its stead, fit to be shown."""
    for name in (str(directory), escape(directory)):
        text = text.replace(name, escape(place))
    return text


def _existing(url: str, options: Mapping[str, Any]) -> Location:
    place = Location.parse(url, options)
    with explain_errors(f"looking for {escape(place)}"):
        if place.is_dir():
            return place
    parent, _, name = place.path.rpartition("/")
    if not parent:
        raise errors.CheckpointNotFound(f"There is no checkpoint {escape(place)}.")
    # What is there has similar names, perhaps.
    storage = CheckpointStorage(dataclasses.replace(place, path=parent).url, options=options)
    return Location.parse(storage.find(name), options)


def _is_checkpoint(place: Location) -> bool:
    with explain_errors(f"looking into {escape(place)}"):
        return any((place / name).exists() for name in _MARKERS)
