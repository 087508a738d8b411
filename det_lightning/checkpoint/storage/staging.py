"""Staging directories: where a checkpoint is written before it is complete, and removing what never was completed.

A mark in the storage's bookkeeping directory names each checkpoint that is being written; if such a checkpoint has no
``metadata.json``, it was never finished. On a local disk a directory is renamed before it is removed: an interrupted
removal leaves nothing under the checkpoint's name, and the next run removes the rest. Only directories that
det_lightning itself made are ever removed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import shutil
import stat
import tempfile
from collections.abc import Iterable
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import CODE_DIR, LOAD_DATA_FILE, METADATA_FILE, SHARDS_DIR, STAGING_MARK
from det_lightning.checkpoint.storage.leases import Lease, is_abandoned, new_content, remove_if_empty
from det_lightning.checkpoint.storage.location import (
    Location,
    bookkeeping_path,
    checkpoint_path,
    is_name,
    is_own_id,
    new_id,
    write_whole,
)
from det_lightning.checkpoint.storage.transfer import RetryPolicy, upload
from det_lightning.escaping import escape

logger = logging.getLogger(__name__)

# Prefix of the temporary directories of writers to remote storages.
_STAGING_PREFIX = "det_lightning-"
# "replaced" is the name of earlier releases.
_REMOVED_DIRS = ("removed", "replaced")
_MARKS_DIR = "partial"
_MARK_SUFFIX = ".json"


def find_writers(root: Location) -> dict[str, bool]:
    """Return the ids of the checkpoints that were begun, and whether their writer may still live."""
    marks = bookkeeping_path(root, _MARKS_DIR)
    ids = [name.removesuffix(_MARK_SUFFIX) for name in marks.list_names() if name.endswith(_MARK_SUFFIX)]
    return {name: not is_abandoned(marks / f"{name}{_MARK_SUFFIX}") for name in ids if is_name(name)}


def find_marked(root: Location) -> set[str]:
    """Return the ids of the checkpoints that are being written or removed, or whose writer was killed."""
    names = bookkeeping_path(root, _MARKS_DIR).list_names()
    return {name.removesuffix(_MARK_SUFFIX) for name in names if name.endswith(_MARK_SUFFIX)}


def mark_removal(root: Location, checkpoint_id: str) -> Location:
    """Mark a checkpoint of a remote storage that is going to be removed; return the mark, to be removed afterwards.

    If that is interrupted, the rest is known to be incomplete, and is removed like that of a killed writer.
    """
    mark = bookkeeping_path(root, _MARKS_DIR) / f"{checkpoint_id}{_MARK_SUFFIX}"
    mark.write(_to_json(new_content()))
    return mark


def remove_abandoned(root: Location, own_only: bool = False) -> list[str]:
    """Remove the incomplete checkpoints of writers that are gone: killed, or cut off. Return the ids.

    On a local disk all are renamed before the first is removed. ``own_only`` leaves what other users have there.
    """
    aside: list[pathlib.Path] = []
    marks = bookkeeping_path(root, _MARKS_DIR)
    removed_ids = []
    for name in marks.list_names():
        checkpoint_id, _, suffix = name.rpartition(".")
        if f".{suffix}" not in (_MARK_SUFFIX, ".new") or not is_name(checkpoint_id) or not is_abandoned(marks / name):
            continue
        checkpoint = checkpoint_path(root, checkpoint_id)
        # The writer of a mark that never got its final name had not begun.
        if f".{suffix}" == _MARK_SUFFIX and checkpoint.exists() and not (checkpoint / METADATA_FILE).exists():
            if not _is_own_partial(checkpoint) or (own_only and _is_of_another_user(checkpoint)):
                continue
            logger.warning("Removing the incomplete checkpoint %s: its writer ended before it did.", escape(checkpoint))
            if root.is_local:
                aside.append(move_aside(root, checkpoint.local_path))
            else:
                checkpoint.remove()
            removed_ids.append(checkpoint_id)
        (marks / name).remove()
    for directory in aside:
        remove_tree(directory)
    if root.is_local:
        remove_if_empty(marks.local_path)
        _finish_removals(root, own_only)
    return removed_ids


def _is_of_another_user(location: Location) -> bool:
    try:
        return location.is_local and not _is_own_directory(location.local_path)
    except FileNotFoundError:  # another process has just removed it
        return True


def _is_own_partial(checkpoint: Location) -> bool:
    """Return whether a killed writer of det_lightning left this directory: it writes the code, then the load data."""
    if not is_own_id(checkpoint.name) or checkpoint.link_target() is not None or not checkpoint.is_dir():
        return False
    names = {*checkpoint.list_names(), *checkpoint.list_links()}
    return METADATA_FILE not in names and (LOAD_DATA_FILE in names or names <= {CODE_DIR, SHARDS_DIR})


def move_aside(root: Location, directory: pathlib.Path) -> pathlib.Path:
    """Rename a directory of a local storage that is to be removed; return its new path."""
    while True:
        aside = bookkeeping_path(root, _REMOVED_DIRS[0], new_id()).local_path
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            directory.rename(aside)
        except FileNotFoundError:
            if not os.path.lexists(directory):
                raise
            continue  # another process has just removed the empty directory
        return aside


def remove_tree(directory: pathlib.Path) -> None:
    """Remove a directory that other processes may be removing too; of links in it, only the links themselves."""
    while directory.exists():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)
    remove_if_empty(directory.parent)


def _finish_removals(root: Location, own_only: bool) -> None:
    """Remove what processes had renamed to be removed when they were killed."""
    for name in _REMOVED_DIRS:
        removed = bookkeeping_path(root, name)
        for one in removed.list_names():
            if not is_own_id(one) or (own_only and _is_of_another_user(removed / one)):
                continue
            try:
                remove_tree((removed / one).local_path)
            except OSError as e:  # another user's, perhaps; training need not wait for that
                logger.warning("The rest of a removed checkpoint, %s, stays: %s", escape(removed / one), escape(e))


def remove_dead_stagings() -> None:
    """Remove temporary directories of this user's writers to remote storages that were killed."""
    for directory in pathlib.Path(tempfile.gettempdir()).glob(f"{_STAGING_PREFIX}*"):
        try:
            if _is_own_directory(directory) and is_abandoned(Location.parse(directory / STAGING_MARK)):
                logger.warning("Removing %s, which a killed writer left behind.", escape(directory))
                _remove_dead_staging(directory)
        except OSError as e:  # another process was faster, or it is not to be removed
            logger.warning("%s, which a killed writer left behind, stays: %s", escape(directory), escape(e))


def _remove_dead_staging(directory: pathlib.Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    shutil.rmtree(directory)  # with the mark, by which it is known


def _is_own_directory(path: pathlib.Path) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and (not hasattr(os, "getuid") or found.st_uid == os.getuid())


class LocalStaging:
    """The final directory, on a local disk. A lock on its mark shows others that the writer lives."""

    def __init__(self, root: Location, checkpoint_id: str) -> None:
        self.directory = checkpoint_path(root, checkpoint_id).local_path
        self._mark = Lease.mark(bookkeeping_path(root, _MARKS_DIR) / f"{checkpoint_id}{_MARK_SUFFIX}")
        try:
            self.directory.mkdir(parents=True)
        except BaseException:
            self._mark.release()
            raise

    def commit(self, metadata: dict[str, Any], names: Iterable[str]) -> None:
        """Complete the checkpoint, which has the files ``names``: write ``metadata.json`` last."""
        folders = [folder for folder, _, _ in os.walk(self.directory, topdown=False)]
        _sync([*map(self.directory.joinpath, names), *folders])
        write_whole(self.directory / METADATA_FILE, _to_json(metadata))
        _sync([self.directory, self.directory.parent])
        self._mark.release()

    def abandon(self) -> None:
        # First the file that makes it a complete one: an interruption must not leave a damaged checkpoint.
        (self.directory / METADATA_FILE).unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)
        self._mark.release()


def announce(root: Location, checkpoint_id: str, retry: RetryPolicy) -> None:
    """Mark a checkpoint in a remote storage as one that is being written, before its first file is."""
    mark = bookkeeping_path(root, _MARKS_DIR) / f"{checkpoint_id}{_MARK_SUFFIX}"
    retry.call("writing", lambda: mark.write(_to_json(new_content())), where=mark)


class RemoteStaging:
    """A temporary directory, uploaded on :meth:`commit`. A lock on a file in it shows others that the writer lives."""

    def __init__(self, root: Location, checkpoint_id: str, retry: RetryPolicy) -> None:
        self._root = root
        self._target = checkpoint_path(root, checkpoint_id)
        self._mark = bookkeeping_path(root, _MARKS_DIR) / f"{checkpoint_id}{_MARK_SUFFIX}"
        self._retry = retry
        self._staging = pathlib.Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX))
        self.directory = self._staging / checkpoint_id
        try:
            self._lease = Lease.mark(Location.parse(self._staging / STAGING_MARK))
            self.directory.mkdir()
        except BaseException:
            shutil.rmtree(self._staging, ignore_errors=True)
            raise

    def commit(self, metadata: dict[str, Any], names: Iterable[str]) -> None:
        """Upload all files; where the storage fails for good, keep the local copy, which is complete."""
        # The load data come first: by them an incomplete checkpoint is known.
        in_order = sorted(names, key=lambda name: (name != LOAD_DATA_FILE, name))
        write_whole(self.directory / METADATA_FILE, _to_json(metadata))
        try:
            announce(self._root, self.directory.name, self._retry)
            upload(self.directory, [*in_order, METADATA_FILE], self._target, self._retry)
        except errors.StorageError as e:
            # Without its mark the directory is not taken for one that a killed writer left.
            self._lease.release()
            raise errors.StorageError(
                f"{e} The checkpoint is not in the storage; a complete copy is kept in {escape(self.directory)}."
            ) from e
        self.abandon()
        try:
            self._retry.call("removing", self._mark.remove, where=self._mark)
        except errors.StorageError as e:
            logger.warning(
                "The checkpoint %s is complete, but the mark of its writing stays: %s", escape(self._target), e
            )

    def abandon(self) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)
        self._lease.release()


#: Where one checkpoint is written; ``abandon`` removes what was written.
StagingDirectory = LocalStaging | RemoteStaging


def _sync(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Wait until the disk holds the content of files and directories."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _to_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, default=str).encode("utf-8")
