"""Where a checkpoint is written before it is complete, and how it becomes so, whole or not at all.

A mark in the storage's bookkeeping directory says that a checkpoint is being written. What it names and has no
``metadata.json`` was never finished.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, Protocol

from det_lightning import errors
from det_lightning.checkpoint.format.layout import LOAD_DATA_FILE, METADATA_FILE, STAGING_MARK
from det_lightning.checkpoint.storage.leftovers import STAGING_PREFIX, marks_path, remove_empty
from det_lightning.checkpoint.storage.location import Location
from det_lightning.checkpoint.storage.marks import MARK_SUFFIX, mark_content, write_locked
from det_lightning.checkpoint.storage.paths import checkpoint_path
from det_lightning.checkpoint.storage.transfer import RetryPolicy, upload
from det_lightning.escaping import escape

__all__ = ["LocalPlace", "Place", "RemotePlace"]

logger = logging.getLogger("det_lightning.checkpoint")


class Place(Protocol):
    """A directory to write one checkpoint into."""

    directory: pathlib.Path

    def commit(self, metadata: dict[str, Any]) -> None:
        """Make the checkpoint a complete one: bring all of it into the storage, ``metadata.json`` last."""

    def abandon(self) -> None:
        """Remove what was written."""


class LocalPlace:
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


class RemotePlace:
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
