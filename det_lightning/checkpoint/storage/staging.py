"""Staging directories, the place of a checkpoint before completion; removing checkpoints and what killed writers left.

A mark in the storage's bookkeeping directory names each checkpoint under way; on a disk it is an empty file that is
locked while the writer lives. A marked checkpoint without ``metadata.json``, and without a writer, was never finished.
On a disk a directory is renamed before the removal: an interrupted removal leaves nothing under the checkpoint's name,
and the next run removes the rest. Only checkpoints, and directories that det_lightning itself created, are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable
from types import TracebackType
from typing import Any

from fsspec import AbstractFileSystem

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR, LOAD_DATA_FILE, METADATA_FILE, STAGING_MARK
from det_lightning.checkpoint.storage.location import (
    Location,
    explain_errors,
    is_name,
    is_own_id,
    new_id,
    upload,
)
from det_lightning.escaping import get_logger
from det_lightning.files.local_files import is_locked, lock_new_file, write_whole

logger = get_logger(__name__)

#: Prefix of the temporary directories of writers to remote storages.
STAGING_PREFIX = "det_lightning-"
#: The directory of the marks.
MARKS_DIR = "staging"
_MARK_SUFFIX = ".lock"
_REMOVED_DIR = "removed"
# What earlier releases kept beside the checkpoints: claims, marks, and the indexes of trials and of buckets.
_OLD_BOOKKEEPING = ("runs", "in_use", "partial", "index", "checkpoints.json")

# Other programs also write a metadata.json or a checkpoint.pt; their directories lack these.
_OWN_MARKERS = {layout.LOAD_DATA_FILE, layout.RESUME_FILE, layout.TRIAL_STATE_FILE}
# A directory with none of these is neither a checkpoint nor the rest of one.
_MARKERS = {layout.METADATA_FILE, *layout.STATE_FILES, *_OWN_MARKERS}
# Without locks, a writer counts as alive for this time; no checkpoint takes so long to write.
_LASTS_S = 24 * 3600.0


def mark_of(root: Location, checkpoint_id: str) -> Location:
    """Return the mark of a checkpoint that is being written or removed."""
    return root.bookkeeping(MARKS_DIR) / f"{checkpoint_id}{_MARK_SUFFIX}"


def list_marks(root: Location) -> dict[str, Location]:
    """Return the marks of a storage by checkpoint id."""
    marks = root.bookkeeping(MARKS_DIR)
    names = {name: name.removesuffix(_MARK_SUFFIX) for name in marks.list_names()}
    return {checkpoint_id: marks / name for name, checkpoint_id in names.items() if is_name(checkpoint_id)}


def is_over(mark: Location) -> bool:
    """Return whether the writer that made a mark has ended: the lock is free or, without locks, a day has passed."""
    try:
        if mark.is_local and (locked := is_locked(mark.local_path)) is not None:
            return not locked
        made_s = mark.modified_s()
    except OSError:  # finished meanwhile, or another user's
        return False
    return made_s is not None and time.time() - made_s > _LASTS_S


def remove_if_empty(folder: pathlib.Path) -> None:
    """Remove an empty directory in the bookkeeping, and empty parents up to the bookkeeping directory."""
    while BOOKKEEPING_DIR in folder.parts:
        with contextlib.suppress(OSError):
            folder.rmdir()
        if folder.name == BOOKKEEPING_DIR or folder.exists():
            return
        folder = folder.parent


class _Staging:
    """The files of a checkpoint before completion; in a ``with`` block, any error abandons them."""

    root: Location
    directory: pathlib.Path
    #: Whether the directory stays after an error, as the only copy of a complete checkpoint.
    is_kept = False

    def announce(self) -> None:
        """Mark the checkpoint as being written, before the first file is; after a kill the mark shows the rest."""

    def abandon(self) -> None:
        """Remove what was written."""
        raise NotImplementedError

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not self.is_kept:
            self.abandon()


class LocalStaging(_Staging):
    """The final directory, on a disk."""

    def __init__(self, root: Location, checkpoint_id: str) -> None:
        self.root = root
        self.directory = root.checkpoint(checkpoint_id).local_path
        self._mark = lock_new_file(mark_of(root, checkpoint_id).local_path)
        try:
            self.directory.mkdir(parents=True)
        except BaseException:
            self._remove_mark()
            raise

    def commit(self, metadata: dict[str, Any], names: Collection[str] | None = None) -> None:
        """Complete the checkpoint: flush the files ``names``, by default all, to the disk; write ``metadata`` last."""
        if names is None:
            paths = [path for path in self.directory.rglob("*") if path.is_file()]
            names = [path.relative_to(self.directory).as_posix() for path in paths]
        changed: dict[pathlib.Path, None] = {}  # files and their directories
        for path in map(self.directory.joinpath, names):
            while path != self.directory:
                changed[path] = None
                path = path.parent
        _sync([*changed, self.directory])
        write_whole(self.directory / METADATA_FILE, json.dumps(metadata, allow_nan=False).encode(), sync=True)
        _sync([self.directory, self.directory.parent])
        self._remove_mark()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # of a disk that fails, as the error that ended the writing says
            # First the file that makes it complete: an interruption must not leave a damaged checkpoint.
            (self.directory / METADATA_FILE).unlink(missing_ok=True)
            shutil.rmtree(self.directory, ignore_errors=True)
            self._remove_mark()

    def _remove_mark(self) -> None:
        self._mark.remove()
        remove_if_empty(self._mark.path.parent)


def _in_upload_order(names: Iterable[str]) -> list[str]:
    """Return the files of a checkpoint in the order for an upload to a remote storage."""
    # load_data.json first, by which an incomplete checkpoint is recognised; metadata.json last, which completes it.
    return sorted(names, key=lambda name: (name == METADATA_FILE, name != LOAD_DATA_FILE, name))


class RemoteStaging(_Staging):
    """A temporary directory for an upload by :meth:`commit`. A lock on a file inside shows that the writer is alive."""

    def __init__(self, root: Location, checkpoint_id: str) -> None:
        self.root = root
        self._target = root.checkpoint(checkpoint_id)
        self._mark: Location | None = None
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix=STAGING_PREFIX))
        self.directory = self._folder / checkpoint_id
        try:
            self._own_mark = lock_new_file(self._folder / STAGING_MARK)
            self.directory.mkdir()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def announce(self) -> None:
        if self._mark is None:
            self._mark = announce(self.root, self._target)

    def commit(self, metadata: dict[str, Any], names: Collection[str] | None = None) -> None:
        """Upload the files ``names``, by default none, then ``metadata``.

        If the storage fails, keep the local copy, which is complete.
        """
        write_whole(self.directory / METADATA_FILE, json.dumps(metadata, allow_nan=False).encode(), sync=True)
        try:
            self.announce()
            upload(self.directory, _in_upload_order([*(names or ()), METADATA_FILE]), self._target)
        except errors.StorageError as e:
            if names is None:  # the other files are not here
                raise
            # Without its mark, the directory is not mistaken for one that a killed writer left.
            self._own_mark.remove()
            self.is_kept = True
            raise errors.StorageError(
                f"{e} The checkpoint is not in the storage; a complete copy is kept in {self.directory}."
            ) from e
        self.abandon()
        try:
            with explain_errors("removing", self._mark):
                if self._mark is not None:
                    self._mark.remove()
        except errors.StorageError as e:
            logger.warning("The checkpoint %s is complete, but its mark cannot be removed: %s", self._target, e)

    def abandon(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._own_mark.remove()


#: Where one checkpoint is written; see ``CheckpointStorage.stage``.
StagingDirectory = LocalStaging | RemoteStaging


def open_staging(root: Location, checkpoint_id: str) -> StagingDirectory:
    """Return a new staging directory; raise a ``CheckpointError`` if the directory cannot be made."""
    try:
        return (LocalStaging if root.is_local else RemoteStaging)(root, checkpoint_id)
    except errors.CheckpointError:
        raise
    except OSError as e:
        raise errors.CheckpointError(f"No checkpoint can be written in {root}: {e}") from e


def _sync(paths: Iterable[str | os.PathLike[str]]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def announce(root: Location, checkpoint: Location) -> Location:
    """Mark a checkpoint in a remote storage as being written or removed; return the mark, to be removed afterwards."""
    with explain_errors("marking", checkpoint):
        mark = mark_of(root, checkpoint.name)
        mark.write(b"")
    return mark


def delete(root: Location, directory: Location) -> None:
    """Remove the directory of a checkpoint; raise a ``CheckpointNotFound`` for a link or another directory."""
    files = _require_own_files(directory)
    with explain_errors("removing", directory):
        if root.is_local:
            _remove_tree(_move_aside(root, directory.local_path))
            return
        mark = announce(root, directory)
        # These first: without its metadata and weights, the rest of a checkpoint is never mistaken for one.
        first = [directory / name for name in (layout.METADATA_FILE, *layout.STATE_FILES) if name in files]
        for location in (*first, directory, mark):
            location.remove()


def replace(root: Location, old: Location, new: Location) -> None:
    """Rename the directory ``new`` to ``old``, a checkpoint or link, and remove that; one of them always exists."""
    if not root.is_local:
        _replace_remote(root, old, new)
        return
    aside = None
    if old.link_target() is not None:
        old.local_path.unlink()
    elif old.is_dir():
        _require_own_files(old)
        aside = _move_aside(root, old.local_path)
    new.local_path.rename(old.local_path)
    if aside is not None:
        _remove_tree(aside)


def _replace_remote(root: Location, old: Location, new: Location) -> None:
    """Remove ``old``, then copy ``new``, which exists under its own name meanwhile."""
    delete(root, old)
    fs = root.fs
    if not root.is_object_store and type(fs).cp_file is AbstractFileSystem.cp_file:  # it cannot copy, but rename
        fs.mv(new.path, old.path)
        return
    mark = announce(root, old)
    for name in _in_upload_order([*new.find_files()]):
        target = old / name
        if not root.is_object_store:
            fs.makedirs(target.parent.path, exist_ok=True)
        fs.cp_file(f"{new.path}/{name}", target.path)
    mark.remove()
    delete(root, new)


def _require_own_files(directory: Location) -> set[str]:
    """Return the files of a directory to be removed; raise unless it is itself a checkpoint."""
    with explain_errors("looking for", directory):
        target = directory.link_target()
        files = set(directory.find_files()) if target is None else set()
    if target is not None:
        raise errors.CheckpointNotFound(
            f"{directory} is a link{f' to {target}' if target else ''}, and nothing is deleted through "
            "a link. Delete the checkpoint itself by its id, or remove the link."
        )
    if not files & (_MARKERS if is_own_id(directory.name) else _OWN_MARKERS):
        raise errors.CheckpointNotFound(f"{directory} is not a checkpoint, and is not deleted.")
    return files


def remove_leftovers(root: Location) -> list[str]:
    """Remove the incomplete checkpoints of killed writers, and what killed processes were removing. Return the ids."""
    removed_ids = []
    for checkpoint_id, mark in list_marks(root).items():
        if not is_over(mark):
            continue
        with contextlib.suppress(PermissionError, FileNotFoundError):  # another user's, or removed by another run
            if _remove_unfinished(root, root.checkpoint(checkpoint_id)):
                removed_ids.append(checkpoint_id)
            mark.remove()
    if root.is_local:
        removed = root.bookkeeping(_REMOVED_DIR)
        for name in removed.list_names():
            _remove_tree((removed / name).local_path)
        remove_if_empty(root.bookkeeping(MARKS_DIR).local_path)
    return removed_ids


def _remove_unfinished(root: Location, checkpoint: Location) -> bool:
    """Remove a marked directory without ``metadata.json``, which only its writer can have made; not through a link."""
    if not is_own_id(checkpoint.name) or checkpoint.link_target() is not None or not checkpoint.is_dir():
        return False
    if (checkpoint / layout.METADATA_FILE).exists():
        return False
    logger.warning("Removing the incomplete checkpoint %s, which a killed writer left behind.", checkpoint)
    if root.is_local:
        _move_aside(root, checkpoint.local_path)  # all, before the first is removed
    else:
        checkpoint.remove()
    return True


def remove_old_bookkeeping(root: Location) -> None:
    """Remove the files that only earlier releases read."""
    for name in _OLD_BOOKKEEPING:
        root.bookkeeping(name).remove()


def _move_aside(root: Location, directory: pathlib.Path) -> pathlib.Path:
    """Rename a directory of a local storage before the removal; return the new path."""
    while True:
        aside = root.bookkeeping(_REMOVED_DIR, new_id()).local_path
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            directory.rename(aside)
        except FileNotFoundError:
            if not os.path.lexists(directory):
                raise
            continue  # another process has just removed the empty directory
        return aside


def _remove_tree(directory: pathlib.Path) -> None:
    """Remove a directory that other processes may be removing too; links inside are removed, not followed."""
    while directory.exists():
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            continue
        except OSError as e:  # it may be another user's; that is no reason not to train
            logger.warning("The rest of a removed checkpoint, %s, cannot be deleted: %s", directory, e)
            return
    remove_if_empty(directory.parent)


def remove_dead_stagings() -> None:
    """Remove the temporary directories of this user's killed writers to remote storages."""
    for directory in pathlib.Path(tempfile.gettempdir()).glob(f"{STAGING_PREFIX}*"):
        try:
            if not (_is_own_directory(directory) and is_over(Location.parse(directory / layout.STAGING_MARK))):
                continue
            logger.warning("Removing %s, which a killed writer left behind.", directory)
            # Last of all the mark, which identifies the directory.
            for path in [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]:
                shutil.rmtree(path)
            shutil.rmtree(directory)
        except OSError as e:  # another process was faster, or it must not be removed
            logger.warning("%s, which a killed writer left behind, stays: %s", directory, e)


def _is_own_directory(path: pathlib.Path) -> bool:
    return not path.is_symlink() and path.is_dir() and (not hasattr(os, "getuid") or path.stat().st_uid == os.getuid())
