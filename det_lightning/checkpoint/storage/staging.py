"""Staging directories: where a checkpoint is written before it is complete.

A mark in the storage's bookkeeping directory names each checkpoint that is being written; if such a checkpoint has no
``metadata.json``, it was never finished.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import LOAD_DATA_FILE, METADATA_FILE, STAGING_MARK
from det_lightning.checkpoint.storage.claims import is_abandoned, new_content, remove_if_empty
from det_lightning.checkpoint.storage.location import Location, explain_errors, is_name, new_id, write_whole
from det_lightning.checkpoint.storage.transfer import RetryPolicy, StoredFiles, upload
from det_lightning.escaping import escape
from det_lightning.files.locks import lock_new_file

if TYPE_CHECKING:
    from det_lightning.checkpoint.format.code_copy import CodeCopier
    from det_lightning.checkpoint.format.content import CheckpointContent

logger = logging.getLogger(__name__)

#: Prefix of the temporary directories of writers to remote storages.
STAGING_PREFIX = "det_lightning-"
#: The directory of the marks, and the end of their names.
MARKS_DIR = "partial"
MARK_SUFFIX = ".json"


def find_writers(root: Location) -> dict[str, bool]:
    """Return the ids of the checkpoints that were begun, and whether their writer may still be alive."""
    return {name: not is_abandoned(_mark_of(root, name)) for name in find_marked(root) if is_name(name)}


def find_marked(root: Location) -> set[str]:
    """Return the ids of the checkpoints that are being written or removed, or whose writer was killed."""
    names = root.bookkeeping(MARKS_DIR).list_names()
    return {name.removesuffix(MARK_SUFFIX) for name in names if name.endswith(MARK_SUFFIX)}


def _mark_of(root: Location, checkpoint_id: str) -> Location:
    return root.bookkeeping(MARKS_DIR) / f"{checkpoint_id}{MARK_SUFFIX}"


class _Staging:
    """Where the files of one checkpoint are before it is complete; with ``content``, they are those of a trial."""

    directory: pathlib.Path
    content: CheckpointContent | None = None
    code: CodeCopier | None = None

    def list_files(self) -> list[str]:
        """Return the paths of all files, relative to the directory."""
        return [path.relative_to(self.directory).as_posix() for path in self.directory.rglob("*") if path.is_file()]


class LocalStaging(_Staging):
    """The final directory, on a local disk. A lock on its mark shows others that the writer is alive."""

    def __init__(self, root: Location, checkpoint_id: str) -> None:
        self.root = root
        self.directory = root.checkpoint(checkpoint_id).local_path
        self._mark = lock_new_file(_mark_of(root, checkpoint_id).local_path, json.dumps(new_content()).encode())
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
        write_whole(self.directory / METADATA_FILE, json.dumps(metadata, allow_nan=False).encode())
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
    """Mark a checkpoint in a remote storage as being written or removed, before its first file is.

    Return the mark, to be removed afterwards. After an interruption the mark shows that the rest is incomplete.
    """
    mark = retry.call("looking at", lambda: _mark_of(root, checkpoint_id), where=root)
    retry.call("writing", lambda: mark.write(json.dumps(new_content()).encode()), where=mark)
    return mark


def in_upload_order(names: Iterable[str]) -> list[str]:
    """Return the files of a checkpoint in the order in which a remote storage must get them."""
    # load_data.json first, by which an incomplete checkpoint is recognised; metadata.json last, which completes it.
    return sorted(names, key=lambda name: (name == METADATA_FILE, name != LOAD_DATA_FILE, name))


class RemoteStaging(_Staging):
    """A temporary directory, uploaded on :meth:`commit`. A lock on a file in it shows that the writer is alive."""

    def __init__(self, root: Location, checkpoint_id: str, retry: RetryPolicy) -> None:
        self.root = root
        self._target = root.checkpoint(checkpoint_id)
        self._mark = retry.call("looking at", lambda: _mark_of(root, checkpoint_id), where=root)
        self._retry = retry
        self._staging = pathlib.Path(tempfile.mkdtemp(prefix=STAGING_PREFIX))
        self.directory = self._staging / checkpoint_id
        try:
            self._own_mark = lock_new_file(self._staging / STAGING_MARK, json.dumps(new_content()).encode())
            self.directory.mkdir()
        except BaseException:
            shutil.rmtree(self._staging, ignore_errors=True)
            raise

    def commit(self, metadata: dict[str, Any], names: Iterable[str], unchanged: StoredFiles | None = None) -> None:
        """Upload all files; an object store copies those that are ``unchanged``.

        If the storage fails for good, keep the local copy, which is complete.
        """
        in_order = in_upload_order([*names, METADATA_FILE])
        write_whole(self.directory / METADATA_FILE, json.dumps(metadata, allow_nan=False).encode())
        try:
            announce(self.root, self.directory.name, self._retry)
            upload(self.directory, in_order, self._target, self._retry, unchanged)
        except errors.StorageError as e:
            # Without its mark, the directory is not mistaken for one that a killed writer left.
            self._own_mark.remove()
            raise errors.StorageError(
                f"{e} The checkpoint is not in the storage; a complete copy is kept in {escape(self.directory)}."
            ) from e
        self.abandon()
        try:
            self._retry.call("removing", self._mark.remove, where=self._mark)
        except errors.StorageError as e:
            logger.warning(
                "The checkpoint %s is complete, but the mark of its writer cannot be removed: %s",
                escape(self._target),
                e,
            )

    def abandon(self) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)
        self._own_mark.remove()


#: Where one checkpoint is written; ``abandon`` removes what was written.
StagingDirectory = LocalStaging | RemoteStaging


@contextlib.contextmanager
def abandoning(staging: StagingDirectory | None, unless: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Abandon a staging directory, of which only the chief has one, after any error except ``unless``."""
    try:
        yield
    except BaseException as error:
        if staging is not None and not isinstance(error, unless):
            staging.abandon()
        raise


def require_writable(root: Location, retry: RetryPolicy) -> None:
    """Write a file to a storage and remove it; raise a ``StorageError`` that says why if that is not possible."""
    content = b"to see whether it can be written"
    if not root.is_local:
        name = f"probe-{new_id()}"
        probe = retry.call("trying to write to", lambda: root.bookkeeping(name), where=root)
        retry.call("trying to write", lambda: probe.write(content), where=probe)
        retry.call("removing", probe.remove, where=probe)
        return
    directory = root.local_path
    if directory.exists() and not directory.is_dir():
        raise errors.StorageError(
            f"{escape(root)} is a file, and no checkpoints can be written to it: a storage is a directory, or a "
            "URL such as s3://bucket/prefix."
        )
    with explain_errors("trying to write to", root):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(content)


def _sync(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Wait until the content of files and directories is on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
