"""Removing checkpoints, and the remains of killed writers.

On a local disk a directory is renamed before the removal: an interrupted removal leaves nothing under the checkpoint's
name, and the next run removes the rest. Only directories that det_lightning itself created, and checkpoints, are ever
removed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import shutil
import stat
import tempfile

from fsspec import AbstractFileSystem

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.storage.claims import is_abandoned, remove_if_empty
from det_lightning.checkpoint.storage.location import Location, explain_errors, is_name, is_own_id, new_id
from det_lightning.checkpoint.storage.staging import MARK_SUFFIX, MARKS_DIR, STAGING_PREFIX, announce, in_upload_order
from det_lightning.checkpoint.storage.transfer import RetryPolicy
from det_lightning.escaping import get_logger

logger = get_logger(__name__)

_REMOVED_DIR = "removed"

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


def remove_abandoned(root: Location, own_only: bool = False) -> list[str]:
    """Remove the incomplete checkpoints of writers that were killed or cut off. Return the ids.

    On a local disk all are renamed before the first is removed. ``own_only`` leaves other users' checkpoints.
    """
    marks = root.bookkeeping(MARKS_DIR)
    removed_ids = []
    for name in marks.list_names():
        checkpoint_id, _, suffix = name.rpartition(".")
        if f".{suffix}" not in (MARK_SUFFIX, ".new") or not is_name(checkpoint_id) or not is_abandoned(marks / name):
            continue
        checkpoint = root.checkpoint(checkpoint_id)
        # A mark that never got its final name belongs to a writer that had not begun.
        if f".{suffix}" == MARK_SUFFIX and checkpoint.exists() and not (checkpoint / layout.METADATA_FILE).exists():
            if not _is_own_partial(checkpoint) or (own_only and _is_of_another_user(checkpoint)):
                continue
            logger.warning("Removing the incomplete checkpoint %s, which a killed writer left behind.", checkpoint)
            if root.is_local:
                _move_aside(root, checkpoint.local_path)
            else:
                checkpoint.remove()
            removed_ids.append(checkpoint_id)
        with contextlib.suppress(PermissionError):  # another user's
            (marks / name).remove()
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
    """Return whether a killed writer of det_lightning left this directory: the code comes first, then the load data."""
    if not is_own_id(checkpoint.name) or checkpoint.link_target() is not None or not checkpoint.is_dir():
        return False
    names = {*checkpoint.list_names(), *checkpoint.list_links()}
    return layout.METADATA_FILE not in names and (
        layout.LOAD_DATA_FILE in names or names <= {layout.CODE_DIR, layout.SHARDS_DIR}
    )


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
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)
    remove_if_empty(directory.parent)


def _finish_removals(root: Location, own_only: bool) -> None:
    """Remove directories that killed processes had renamed for removal."""
    removed = root.bookkeeping(_REMOVED_DIR)
    for directory in [removed / name for name in removed.list_names() if is_own_id(name)]:
        if own_only and _is_of_another_user(directory):
            continue
        try:
            _remove_tree(directory.local_path)
        except OSError as e:  # it may be another user's; that is no reason not to train
            logger.warning("The rest of a removed checkpoint, %s, cannot be deleted: %s", directory, e)


def remove_dead_stagings() -> None:
    """Remove the temporary directories of this user's killed writers to remote storages."""
    for directory in pathlib.Path(tempfile.gettempdir()).glob(f"{STAGING_PREFIX}*"):
        try:
            if not (_is_own_directory(directory) and is_abandoned(Location.parse(directory / layout.STAGING_MARK))):
                continue
            logger.warning("Removing %s, which a killed writer left behind.", directory)
            # Last of all the mark, which identifies the directory.
            for path in [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]:
                shutil.rmtree(path)
            shutil.rmtree(directory)
        except OSError as e:  # another process was faster, or it must not be removed
            logger.warning("%s, which a killed writer left behind, stays: %s", directory, e)


def _is_own_directory(path: pathlib.Path) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and (not hasattr(os, "getuid") or found.st_uid == os.getuid())
