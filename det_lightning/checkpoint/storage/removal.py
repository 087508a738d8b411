"""Removing checkpoints, and the remains of killed writers.

On a disk a directory is renamed before the removal: an interrupted removal leaves nothing under the checkpoint's name,
and the next run removes the rest. Only checkpoints, and directories that det_lightning itself created, are removed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import shutil
import tempfile

from fsspec import AbstractFileSystem

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.storage.location import Location, explain_errors, is_name, is_own_id, new_id
from det_lightning.checkpoint.storage.staging import (
    MARKS_DIR,
    STAGING_PREFIX,
    announce,
    in_upload_order,
    is_over,
    list_marks,
    remove_if_empty,
)
from det_lightning.checkpoint.storage.transfer import RetryPolicy
from det_lightning.escaping import get_logger

logger = get_logger(__name__)

_REMOVED_DIR = "removed"
# What earlier releases kept beside the checkpoints: claims, marks, and the indexes of trials and of buckets.
_OLD_BOOKKEEPING = ("runs", "in_use", "partial", "index", "checkpoints.json")

# Other programs also write a metadata.json or a checkpoint.pt; their directories lack these.
_OWN_MARKERS = {layout.LOAD_DATA_FILE, layout.RESUME_FILE, layout.TRIAL_STATE_FILE}
# A directory with none of these is neither a checkpoint nor the rest of one.
_MARKERS = {layout.METADATA_FILE, *layout.STATE_FILES, *_OWN_MARKERS}


def delete(root: Location, directory: Location, retry: RetryPolicy) -> None:
    """Remove the directory of a checkpoint; raise a ``CheckpointNotFound`` for a link or another directory."""
    files = retry.call("looking for", lambda: _require_own_files(directory), where=directory)
    if root.is_local:
        with explain_errors("removing", directory):
            _remove_tree(_move_aside(root, directory.local_path))
        return
    mark = announce(root, directory.name, retry)
    # These first: without its metadata and weights, the rest of a checkpoint is never mistaken for one.
    first = [directory / name for name in (layout.METADATA_FILE, *layout.STATE_FILES) if name in files]
    for location in (*first, directory, mark):
        retry.call("removing", location.remove, where=directory)


def replace(root: Location, old: Location, new: Location, retry: RetryPolicy) -> None:
    """Give the directory ``new`` the name of the checkpoint or link ``old``, and remove ``old``; one always exists."""
    if not root.is_local:
        _replace_remote(root, old, new, retry)
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


def _replace_remote(root: Location, old: Location, new: Location, retry: RetryPolicy) -> None:
    """Remove ``old`` first, then copy; meanwhile ``new`` exists under the present name."""
    delete(root, old, retry)
    fs = root.fs
    if not root.is_object_store and type(fs).cp_file is AbstractFileSystem.cp_file:  # it cannot copy, but rename
        retry.call("renaming", lambda: fs.mv(new.path, old.path), where=new)
        return
    mark = announce(root, old.name, retry)
    for name in in_upload_order([*new.find_files()]):
        target = old / name
        if not root.is_object_store:
            fs.makedirs(target.parent.path, exist_ok=True)
        retry.call("copying", functools.partial(fs.cp_file, f"{new.path}/{name}", target.path), where=target)
    retry.call("removing", mark.remove, where=mark)
    delete(root, new, retry)


def _require_own_files(directory: Location) -> set[str]:
    """Return the names of the files of a directory to be removed; raise unless the directory is a checkpoint itself."""
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
        with contextlib.suppress(PermissionError):  # another user's
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
    """Remove the files that only earlier releases read, and what their killed writers had marked."""
    marks = root.bookkeeping("partial")
    for name in marks.list_names():
        checkpoint_id, _, _ = name.rpartition(".")
        if is_name(checkpoint_id) and is_over(marks / name):
            _remove_unfinished(root, root.checkpoint(checkpoint_id))
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
    """Remove a directory that other processes may be removing too; of links inside, only the links themselves."""
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
