"""Where a checkpoint is written before it is complete, how it becomes so, and removing what never did.

A mark in the storage's bookkeeping directory says that a checkpoint is being written. What it names and has no
``metadata.json`` was never finished. On a local disk what is to go is renamed first: of a removal that is cut off
nothing is left under the checkpoint's name, and the next run removes the rest. Only what det_lightning itself made is
ever removed.
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
from collections.abc import Iterator
from typing import Any, Protocol

from det_lightning import errors
from det_lightning.checkpoint.format.layout import CODE_DIR, LOAD_DATA_FILE, METADATA_FILE, STAGING_MARK
from det_lightning.checkpoint.storage.location import Location
from det_lightning.checkpoint.storage.locks import MARK_SUFFIX, is_abandoned, mark_content, write_locked
from det_lightning.checkpoint.storage.paths import bookkeeping_path, checkpoint_path, is_name, is_own_id, new_id
from det_lightning.checkpoint.storage.transfer import RetryPolicy, upload
from det_lightning.escaping import escape

logger = logging.getLogger(__name__)

#: Begins the names of the temporary directories of writers to remote storages.
STAGING_PREFIX = "det_lightning-"

# "replaced" is the name of earlier releases.
_REMOVED_DIRS = ("removed", "replaced")


def marks_path(root: Location) -> Location:
    """Return the directory of the marks of the checkpoints that are being written."""
    return bookkeeping_path(root, "partial")


def find_writers(root: Location) -> dict[str, bool]:
    """Return the ids of the checkpoints that someone began to write, and whether that writer may still be at it."""
    marks = marks_path(root)
    ids = [name.removesuffix(MARK_SUFFIX) for name in marks.list_names() if name.endswith(MARK_SUFFIX)]
    return {name: not is_abandoned(marks / f"{name}{MARK_SUFFIX}") for name in ids if is_name(name)}


def remove_abandoned(root: Location) -> list[str]:
    """Remove what writers left behind that are gone: killed, or cut off. Return the ids.

    Raises:
        StorageError: the bookkeeping of the storage lies behind a link.
    """
    if root.is_local:
        _finish_removals(root)
    marks = marks_path(root)
    removed_ids = []
    for name in marks.list_names():
        checkpoint_id, _, suffix = name.rpartition(".")
        if f".{suffix}" not in (MARK_SUFFIX, ".new") or not is_name(checkpoint_id) or not is_abandoned(marks / name):
            continue
        checkpoint = checkpoint_path(root, checkpoint_id)
        # A mark that never got its final name is one whose writer had not begun.
        if f".{suffix}" == MARK_SUFFIX and _is_incomplete(checkpoint):
            if not _is_own_partial(checkpoint):
                continue
            logger.warning("Removing the incomplete checkpoint %s: its writer ended before it did.", escape(checkpoint))
            _remove(root, checkpoint)
            removed_ids.append(checkpoint_id)
        (marks / name).remove()
    if root.is_local:
        remove_empty(marks.local_path)
    return removed_ids


def _is_incomplete(checkpoint: Location) -> bool:
    return checkpoint.exists() and not (checkpoint / METADATA_FILE).exists()


def _is_own_partial(checkpoint: Location) -> bool:
    """Tell whether a directory is what a writer of ours leaves that is killed: first the code, then the load data."""
    if not is_own_id(checkpoint.name) or checkpoint.link_target() is not None or not checkpoint.is_dir():
        return False
    names = {*checkpoint.list_names(), *checkpoint.list_links()}
    return METADATA_FILE not in names and (LOAD_DATA_FILE in names or names <= {CODE_DIR})


def _remove(root: Location, checkpoint: Location) -> None:
    if checkpoint.is_local:
        remove_tree(move_aside(root, checkpoint.local_path))
    else:
        checkpoint.remove()


def move_aside(root: Location, directory: pathlib.Path) -> pathlib.Path:
    """Rename a directory of a local storage that is to be removed; return where it is now.

    Raises:
        FileNotFoundError: it is not there.
    """
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
    """Remove a directory that others may be removing too; of links in it, only the links themselves."""
    while directory.exists():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)
    remove_empty(directory.parent)


def _finish_removals(root: Location) -> None:
    """Remove what was renamed for that, by processes that were killed then."""
    for name in _REMOVED_DIRS:
        removed = bookkeeping_path(root, name)
        for one in removed.list_names():
            if not is_own_id(one):
                continue
            try:
                remove_tree((removed / one).local_path)
            except OSError as e:  # another user's, perhaps; training need not wait for that
                logger.warning("What is left of a removed checkpoint, %s, stays: %s", escape(removed / one), escape(e))


def remove_empty(folder: pathlib.Path) -> None:
    """Where nothing else is kept, leave nothing behind beside the checkpoints: remove a directory of the bookkeeping,
    and the bookkeeping itself, if they are empty.
    """
    for one in (folder, folder.parent):
        with contextlib.suppress(OSError):
            one.rmdir()


def remove_dead_stagings() -> None:
    """Remove temporary directories of this user's writers to remote storages that were killed."""
    for directory in pathlib.Path(tempfile.gettempdir()).glob(f"{STAGING_PREFIX}*"):
        try:
            if _is_own_directory(directory) and is_abandoned(Location.parse(directory / STAGING_MARK)):
                logger.warning("Removing %s, which a writer left that was killed.", escape(directory))
                for path in directory.iterdir():
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                shutil.rmtree(directory)  # with the mark, by which it is known
        except OSError as e:  # another process was faster, or it is not to be removed
            logger.warning("%s, which a writer left that was killed, stays: %s", escape(directory), escape(e))


def _is_own_directory(path: pathlib.Path) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and (not hasattr(os, "getuid") or found.st_uid == os.getuid())


class StagingDirectory(Protocol):
    """A directory to write one checkpoint into."""

    directory: pathlib.Path

    def commit(self, metadata: dict[str, Any]) -> None:
        """Make the checkpoint a complete one: bring all of it into the storage, ``metadata.json`` last."""

    def abandon(self) -> None:
        """Remove what was written."""


class LocalStaging:
    """The final directory, on a local disk. A lock on its mark tells others that the writer lives."""

    def __init__(self, root: Location, checkpoint_id: str) -> None:
        self.directory = checkpoint_path(root, checkpoint_id).local_path
        self._mark = (marks_path(root) / f"{checkpoint_id}{MARK_SUFFIX}").local_path
        self._lock = write_locked(self._mark)
        try:
            self.directory.mkdir(parents=True)
        except BaseException:
            self._forget()
            raise

    def commit(self, metadata: dict[str, Any]) -> None:
        for path in _files_below(self.directory):
            _sync(path)
        for folder in [*_folders_below(self.directory), self.directory]:
            _sync(folder)
        Location.parse(self.directory / METADATA_FILE).write(_to_json(metadata))
        for folder in (self.directory, self.directory.parent):
            _sync(folder)
        self._forget()

    def abandon(self) -> None:
        # First what makes it a complete one: cut off in the middle, this must not leave a damaged one.
        (self.directory / METADATA_FILE).unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)
        self._forget()

    def _forget(self) -> None:
        self._mark.unlink(missing_ok=True)
        self._lock.close()
        remove_empty(self._mark.parent)


class RemoteStaging:
    """A temporary directory, uploaded on :meth:`commit`. A lock on a file in it tells others that the writer lives.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, root: Location, checkpoint_id: str, retry: RetryPolicy) -> None:
        self._target = checkpoint_path(root, checkpoint_id)
        self._mark = marks_path(root) / f"{checkpoint_id}{MARK_SUFFIX}"
        self._retry = retry
        self._staging = pathlib.Path(tempfile.mkdtemp(prefix=STAGING_PREFIX))
        self.directory = self._staging / checkpoint_id
        try:
            self._lock = write_locked(self._staging / STAGING_MARK)
            self.directory.mkdir()
        except BaseException:
            shutil.rmtree(self._staging, ignore_errors=True)
            raise

    def commit(self, metadata: dict[str, Any]) -> None:
        """Upload all files; where the storage fails for good, keep the local copy, which is complete.

        Raises:
            StorageError: the storage failed; names the place of the copy.
        """
        names = {path.relative_to(self.directory).as_posix() for path in _files_below(self.directory)}
        # What is cut off is known by the load data, which come first.
        in_order = sorted(names, key=lambda name: (name != LOAD_DATA_FILE, name))
        Location.parse(self.directory / METADATA_FILE).write(_to_json(metadata))
        try:
            self._retry.call(f"writing {escape(self._mark)}", lambda: self._mark.write(mark_content()))
            upload(self.directory, [*in_order, METADATA_FILE], self._target, self._retry)
        except errors.StorageError as e:
            self._keep_copy()
            raise errors.StorageError(
                f"{e} The checkpoint is not in the storage; a complete copy is kept in {escape(self.directory)}."
            ) from e
        self.abandon()
        try:
            self._retry.call(f"removing {escape(self._mark)}", self._mark.remove)
        except errors.StorageError as e:
            logger.warning(
                "The checkpoint %s is complete, but the mark of its writing stays: %s", escape(self._target), e
            )

    def abandon(self) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)
        self._lock.close()

    def _keep_copy(self) -> None:
        """Without its mark the directory is not taken for one that a killed writer left."""
        (self._staging / STAGING_MARK).unlink(missing_ok=True)
        self._lock.close()


def _files_below(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    return (path for path in directory.rglob("*") if path.is_file())


def _folders_below(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    return (path for path in directory.rglob("*") if path.is_dir())


def _sync(path: pathlib.Path) -> None:
    """Wait until the disk holds what was written to a file, or the entries of a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _to_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, default=str).encode("utf-8")
