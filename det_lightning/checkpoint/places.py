"""Where a checkpoint is written before it is complete, and how it becomes so, whole or not at all.

A file in the storage's bookkeeping directory says that a checkpoint is being written. What it names and has no
``metadata.json`` was never finished; :func:`sweep` removes that once its writer is gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any, Protocol

from det_lightning import errors
from det_lightning.checkpoint.file_locks import make_directory, try_to_lock
from det_lightning.checkpoint.layout import BOOKKEEPING_DIR, METADATA_FILE
from det_lightning.checkpoint.location import Location
from det_lightning.checkpoint.transfer import RetryPolicy, upload

__all__ = ["LocalPlace", "Place", "RemotePlace", "find_writers", "partial_marks", "replaced_dir", "sweep"]

logger = logging.getLogger("det_lightning.checkpoint")

# No checkpoint takes so long to write.
_ABANDONED_AFTER_S = 24 * 3600.0


class Place(Protocol):
    """A directory to write one checkpoint into."""

    directory: pathlib.Path

    def commit(self, metadata: dict[str, Any]) -> None:
        """Make the checkpoint a complete one: bring all of it into the storage, ``metadata.json`` last."""

    def abandon(self) -> None:
        """Remove what was written."""


def partial_marks(root: Location) -> Location:
    """Return the directory of the files that name the checkpoints which are being written."""
    return root / BOOKKEEPING_DIR / "partial"


def replaced_dir(root: Location) -> Location:
    """Return the directory of checkpoints that others have taken the place of, until they are removed."""
    return root / BOOKKEEPING_DIR / "replaced"


def _mark() -> bytes:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}).encode()


class LocalPlace:
    """The final directory, on a local disk. A lock on its mark tells others that the writer lives."""

    def __init__(self, root: Location, checkpoint_id: str) -> None:
        self.directory = root.local_path / checkpoint_id
        self._mark = (partial_marks(root) / f"{checkpoint_id}.json").local_path
        self._lock = _write_locked(self._mark)
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
        shutil.rmtree(self.directory, ignore_errors=True)
        self._forget()

    def _forget(self) -> None:
        self._mark.unlink(missing_ok=True)
        self._lock.close()
        _remove_empty(self._mark.parent)


class RemotePlace:
    """A temporary directory, uploaded on :meth:`commit`.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, root: Location, checkpoint_id: str, retry: RetryPolicy) -> None:
        self._staging = pathlib.Path(tempfile.mkdtemp(prefix="det_lightning-"))
        self.directory = self._staging / checkpoint_id
        self.directory.mkdir()
        self._target = root / checkpoint_id
        self._mark = partial_marks(root) / f"{checkpoint_id}.json"
        self._retry = retry

    def commit(self, metadata: dict[str, Any]) -> None:
        """Upload all files; where the storage fails for good, keep the local copy, which is complete.

        Raises:
            StorageError: the storage failed; names the place of the copy.
        """
        names = sorted(path.relative_to(self.directory).as_posix() for path in _files_below(self.directory))
        Location.parse(self.directory / METADATA_FILE).write(_to_json(metadata))
        try:
            self._retry.call(f"writing {self._mark}", lambda: self._mark.write(_mark()))
            upload(self.directory, [*names, METADATA_FILE], self._target, self._retry)
        except errors.StorageError as e:
            raise errors.StorageError(
                f"{e} The checkpoint is not in the storage; a complete copy is kept in {self.directory}."
            ) from e
        self.abandon()
        try:
            self._retry.call(f"removing {self._mark}", self._mark.remove)
        except errors.StorageError as e:
            logger.warning("The checkpoint %s is complete, but the mark of its writing stays: %s", self._target, e)

    def abandon(self) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)


def sweep(root: Location) -> list[str]:
    """Remove what writers left behind that are gone: killed, or cut off. Return the ids.

    Only what det_lightning itself began to write is looked at.
    """
    swept = []
    replaced_dir(root).remove()
    marks = partial_marks(root)
    for name in marks.list_names():
        mark, checkpoint = marks / name, root / name.removesuffix(".json")
        if not name.endswith((".json", ".new")) or not _is_abandoned(mark):
            continue
        if checkpoint.exists() and not (checkpoint / METADATA_FILE).exists():
            logger.warning("Removing the incomplete checkpoint %s: its writer ended before it did.", checkpoint)
            checkpoint.remove()
            swept.append(checkpoint.name)
        mark.remove()
    if root.is_local:
        _remove_empty(marks.local_path)
    return swept


def _remove_empty(marks: pathlib.Path) -> None:
    """Where nothing else is kept, leave nothing behind beside the checkpoints."""
    for folder in (marks, marks.parent):
        with contextlib.suppress(OSError):
            folder.rmdir()


def find_writers(root: Location) -> dict[str, bool]:
    """Return the ids of the checkpoints that someone began to write, and whether that writer may still be at it."""
    marks = partial_marks(root)
    names = [name for name in marks.list_names() if name.endswith(".json")]
    return {name.removesuffix(".json"): not _is_abandoned(marks / name) for name in names}


def _is_abandoned(mark: Location) -> bool:
    try:
        if mark.is_local:
            with mark.local_path.open("r+b") as file:
                lock_taken = try_to_lock(file)
            if lock_taken is not None:
                return lock_taken
        started = float(json.loads(mark.read())["started"])
    except FileNotFoundError:  # its writer has just finished
        return False
    except PermissionError:  # another user's, who will sweep it
        return False
    except (ValueError, KeyError, TypeError):
        return False
    return time.time() - started > _ABANDONED_AFTER_S


def _write_locked(mark: pathlib.Path) -> IO[bytes]:
    """Write a mark that is locked before it gets the name under which others look for it."""
    unnamed = mark.with_suffix(".new")
    while True:
        make_directory(mark.parent)
        try:
            file = unnamed.open("w+b")
        except FileNotFoundError:  # another writer has just removed the empty directory
            continue
        try:
            file.write(_mark())
            file.flush()
            if try_to_lock(file) is not False:
                unnamed.replace(mark)
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            unnamed.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # what could not be written yet
                file.close()
            raise
        file.close()  # another run has taken it for one that was left behind, before it was locked


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
