"""Staging directories: the place of a checkpoint before completion.

A mark in the storage's bookkeeping directory names each checkpoint under way; a marked checkpoint without
``metadata.json`` was never finished.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import LOAD_DATA_FILE, METADATA_FILE, STAGING_MARK
from det_lightning.checkpoint.storage.claims import is_abandoned, make_claim, remove_if_empty
from det_lightning.checkpoint.storage.location import Location, is_name
from det_lightning.checkpoint.storage.transfer import RetryPolicy, StoredFiles, upload
from det_lightning.escaping import get_logger
from det_lightning.files.local_files import lock_new_file, write_whole

if TYPE_CHECKING:
    from det_lightning.checkpoint.format.code_copy import CodeCopier
    from det_lightning.checkpoint.format.content import CheckpointContent

logger = get_logger(__name__)

#: Prefix of the temporary directories of writers to remote storages.
STAGING_PREFIX = "det_lightning-"
#: The directory of the marks, and the end of their names.
MARKS_DIR = "partial"
MARK_SUFFIX = ".json"


def find_writers(root: Location) -> dict[str, bool]:
    """Return the ids of the checkpoints under way, and whether each writer may still be alive."""
    marks = root.bookkeeping(MARKS_DIR)
    return {name: not is_abandoned(marks / f"{name}{MARK_SUFFIX}") for name in list_marks(root) if is_name(name)}


def list_marks(root: Location) -> set[str]:
    """Return the ids of the checkpoints that are being written or removed, or whose writer was killed."""
    names = root.bookkeeping(MARKS_DIR).list_names()
    return {name.removesuffix(MARK_SUFFIX) for name in names if name.endswith(MARK_SUFFIX)}


class _Staging:
    """The files of a checkpoint before completion; with ``content``, a trial's checkpoint."""

    directory: pathlib.Path
    content: CheckpointContent | None = None
    code: CodeCopier | None = None


class LocalStaging(_Staging):
    """The final directory, on a local disk. A lock on the mark shows others that the writer is alive."""

    def __init__(self, root: Location, checkpoint_id: str, _: RetryPolicy) -> None:
        self.root = root
        self.directory = root.checkpoint(checkpoint_id).local_path
        mark = root.bookkeeping(MARKS_DIR) / f"{checkpoint_id}{MARK_SUFFIX}"
        self._mark = lock_new_file(mark.local_path, json.dumps(make_claim()).encode())
        try:
            self.directory.mkdir(parents=True)
        except BaseException:
            self._remove_mark()
            raise

    def commit(self, metadata: dict[str, Any], names: Iterable[str], unchanged: StoredFiles | None = None) -> None:
        """Complete the checkpoint: flush the files ``names`` to the disk; write the plain ``metadata`` last."""
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
    mark = retry.call("looking at", lambda: root.bookkeeping(MARKS_DIR), where=root) / f"{checkpoint_id}{MARK_SUFFIX}"
    retry.call("writing", lambda: mark.write(json.dumps(make_claim()).encode()), where=mark)
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
        marks = retry.call("looking at", lambda: root.bookkeeping(MARKS_DIR), where=root)
        self._mark = marks / f"{checkpoint_id}{MARK_SUFFIX}"
        self._retry = retry
        self._staging = pathlib.Path(tempfile.mkdtemp(prefix=STAGING_PREFIX))
        self.directory = self._staging / checkpoint_id
        try:
            self._own_mark = lock_new_file(self._staging / STAGING_MARK, json.dumps(make_claim()).encode())
            self.directory.mkdir()
        except BaseException:
            shutil.rmtree(self._staging, ignore_errors=True)
            raise

    def commit(self, metadata: dict[str, Any], names: Iterable[str], unchanged: StoredFiles | None = None) -> None:
        """Upload all files; an object store copies the ``unchanged`` files within the store.

        If the storage fails for good, keep the local copy, which is complete.
        """
        in_order = in_upload_order([*names, METADATA_FILE])
        write_whole(self.directory / METADATA_FILE, json.dumps(metadata, allow_nan=False).encode(), sync=True)
        try:
            announce(self.root, self.directory.name, self._retry)
            upload(self.directory, in_order, self._target, self._retry, unchanged)
        except errors.StorageError as e:
            # Without its mark, the directory is not mistaken for one that a killed writer left.
            self._own_mark.remove()
            raise errors.StorageError(
                f"{e} The checkpoint is not in the storage; a complete copy is kept in {self.directory}."
            ) from e
        self.abandon()
        try:
            self._retry.call("removing", self._mark.remove, where=self._mark)
        except errors.StorageError as e:
            logger.warning(
                "The checkpoint %s is complete, but the mark of its writer cannot be removed: %s",
                self._target,
                e,
            )

    def abandon(self) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)
        self._own_mark.remove()


#: Where one checkpoint is written; ``abandon`` removes what was written.
StagingDirectory = LocalStaging | RemoteStaging


@contextlib.contextmanager
def abandoning(staging: StagingDirectory | None, unless: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Abandon the chief's staging directory, None on other ranks, after any error except ``unless``."""
    try:
        yield
    except BaseException as error:
        if staging is not None and not isinstance(error, unless):
            staging.abandon()
        raise


def _sync(paths: Iterable[str | os.PathLike[str]]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
