"""Staging directories: the place of a checkpoint before completion.

A mark in the storage's bookkeeping directory names each checkpoint under way, on a disk an empty file that is locked
while the writer lives. A marked checkpoint without ``metadata.json``, and without a writer, was never finished.
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

from det_lightning import errors
from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR, LOAD_DATA_FILE, METADATA_FILE, STAGING_MARK
from det_lightning.checkpoint.storage.location import Location, is_name
from det_lightning.checkpoint.storage.transfer import RetryPolicy, StoredFiles, upload
from det_lightning.escaping import get_logger
from det_lightning.files.local_files import is_locked, lock_new_file, write_whole

logger = get_logger(__name__)

#: Prefix of the temporary directories of writers to remote storages.
STAGING_PREFIX = "det_lightning-"
#: The directory of the marks.
MARKS_DIR = "staging"
_MARK_SUFFIX = ".lock"
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

    def __init__(self, root: Location, checkpoint_id: str, _: RetryPolicy) -> None:
        self.root = root
        self.directory = root.checkpoint(checkpoint_id).local_path
        self._mark = lock_new_file(mark_of(root, checkpoint_id).local_path)
        try:
            self.directory.mkdir(parents=True)
        except BaseException:
            self._remove_mark()
            raise

    def commit(
        self, metadata: dict[str, Any], names: Collection[str] | None = None, unchanged: StoredFiles | None = None
    ) -> None:
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


def announce(root: Location, checkpoint_id: str, retry: RetryPolicy) -> Location:
    """Mark a checkpoint in a remote storage as being written or removed, before the first file is.

    Return the mark, to be removed afterwards. After an interruption the mark shows that the rest is incomplete.
    """
    mark = retry.call("looking at", lambda: mark_of(root, checkpoint_id), where=root)
    retry.call("writing", lambda: mark.write(b""), where=mark)
    return mark


def in_upload_order(names: Iterable[str]) -> list[str]:
    """Return the files of a checkpoint in the order for an upload to a remote storage."""
    # load_data.json first, by which an incomplete checkpoint is recognised; metadata.json last, which completes it.
    return sorted(names, key=lambda name: (name == METADATA_FILE, name != LOAD_DATA_FILE, name))


class RemoteStaging(_Staging):
    """A temporary directory for an upload by :meth:`commit`. A lock on a file inside shows that the writer is alive."""

    def __init__(self, root: Location, checkpoint_id: str, retry: RetryPolicy) -> None:
        self.root = root
        self._target = root.checkpoint(checkpoint_id)
        self._retry = retry
        retry.call("looking at", lambda: mark_of(root, checkpoint_id), where=root)
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix=STAGING_PREFIX))
        self.directory = self._folder / checkpoint_id
        try:
            self._own_mark = lock_new_file(self._folder / STAGING_MARK)
            self.directory.mkdir()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def commit(
        self, metadata: dict[str, Any], names: Collection[str] | None = None, unchanged: StoredFiles | None = None
    ) -> None:
        """Upload the files ``names``, by default none; an object store copies the ``unchanged`` files within the store.

        If the storage fails for good, keep the local copy, which is complete.
        """
        write_whole(self.directory / METADATA_FILE, json.dumps(metadata, allow_nan=False).encode(), sync=True)
        try:
            mark = announce(self.root, self.directory.name, self._retry)
            in_order = in_upload_order([*(names or ()), METADATA_FILE])
            upload(self.directory, in_order, self._target, self._retry, unchanged)
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
            self._retry.call("removing", mark.remove, where=mark)
        except errors.StorageError as e:
            logger.warning("The checkpoint %s is complete, but its mark cannot be removed: %s", self._target, e)

    def abandon(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._own_mark.remove()


#: Where one checkpoint is written; see ``CheckpointStorage.stage``.
StagingDirectory = LocalStaging | RemoteStaging


def _sync(paths: Iterable[str | os.PathLike[str]]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
