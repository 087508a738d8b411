"""A storage of checkpoints: one directory for each, named by its id, below a common root."""

from __future__ import annotations

import concurrent.futures
import difflib
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import platformdirs

from det_lightning import errors
from det_lightning.checkpoint.config import storage_from_config
from det_lightning.checkpoint.info import CheckpointInfo, describe, modified, read_metadata
from det_lightning.checkpoint.layout import (
    BOOKKEEPING_DIR,
    LOAD_DATA_FILE,
    METADATA_FILE,
    STATE_FILES,
)
from det_lightning.checkpoint.lineage import Ancestry, newest_first
from det_lightning.checkpoint.location import Location, explain_errors
from det_lightning.checkpoint.places import LocalPlace, Place, RemotePlace, replaced_dir, sweep
from det_lightning.checkpoint.transfer import RetryPolicy

__all__ = ["CheckpointStorage", "new_id"]

logger = logging.getLogger("det_lightning.checkpoint")

# Requests under way at a time; an object store answers each after some milliseconds.
_PARALLEL = 16


def new_id() -> str:
    """Return the id of a new checkpoint."""
    return str(uuid.uuid4())


class CheckpointStorage:
    """A directory of checkpoints, on this machine or on any file system that fsspec knows.

    The layout is Determined's, so that a directory or bucket which it filled is simply opened.

    Args:
        root: a directory, a URL such as ``s3://bucket/prefix``, or the ``checkpoint_storage`` section of an experiment
            configuration. By default the directory that Determined uses for local runs.
        options: what the file system needs to know, such as ``{"endpoint_url": ...}`` or credentials; see the
            documentation of s3fs, gcsfs, adlfs, ...
        retry: how often a transfer is tried.

    Raises:
        StorageError: the URL can not be opened, or the library for it is not installed.
        ValueError: the configuration is wrong; names how.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.options: dict[str, Any] = dict(options or {})
        if isinstance(root, Mapping):
            root, from_config = storage_from_config(root)
            self.options = {**from_config, **self.options}
        self.root = Location.parse(platformdirs.user_data_dir("determined") if root is None else root, self.options)
        self.retry = retry or RetryPolicy()

    @property
    def is_local(self) -> bool:
        """Whether it is a directory of this machine."""
        return self.root.is_local

    def __str__(self) -> str:
        return str(self.root)

    # Writing and removing

    def begin(self, checkpoint_id: str) -> Place:
        """Return a directory to write the checkpoint ``checkpoint_id`` into.

        Raises:
            OSError: it can not be made.
        """
        if self.is_local:
            return LocalPlace(self.root, checkpoint_id)
        return RemotePlace(self.root, checkpoint_id, self.retry)

    def require_writable(self) -> None:
        """Raise if a remote storage can not be written to, before hours of training are at stake.

        Raises:
            StorageError: it can not be; says why.
        """
        if not self.is_local:
            probe = self.root / BOOKKEEPING_DIR / f"probe-{new_id()}"
            self.retry.call(f"trying to write {probe}", lambda: probe.write(b"written to see whether it can be"))
            self.retry.call(f"removing {probe}", probe.remove)

    def delete(self, checkpoint_id: str) -> None:
        """Remove a checkpoint. Cut off in the middle it leaves an incomplete one, never a damaged one.

        Raises:
            CheckpointNotFound: there is none of this id.
            StorageError: the storage refuses.
        """
        place = self._place_of(checkpoint_id)
        if place is None:
            raise self._not_found(checkpoint_id)
        # In this order, for what is left of a checkpoint without its weights is never taken for one.
        for name in (METADATA_FILE, *STATE_FILES):
            self.retry.call(f"removing {place}", (place / name).remove)
        self.retry.call(f"removing {place}", place.remove)

    def replace(self, checkpoint_id: str, by: str) -> None:
        """Give the complete checkpoint ``by`` the id of another one, which is removed.

        On a local disk either of the two is there at any time; elsewhere both are until the first is removed.

        Raises:
            StorageError: the storage refuses.
        """
        old, new = self.root / checkpoint_id, self.root / by
        with explain_errors(f"replacing {old} by {new}"):
            if self.is_local:
                aside = (replaced_dir(self.root) / new_id()).local_path
                aside.parent.mkdir(parents=True, exist_ok=True)
                old.local_path.rename(aside)
                new.local_path.rename(old.local_path)
                shutil.rmtree(aside.parent, ignore_errors=True)
            else:
                self.delete(checkpoint_id)
                new.fs.mv(new.path, old.path, recursive=True)

    def sweep(self) -> list[str]:
        """Remove what writers left behind that were killed; return the ids."""
        with explain_errors(f"looking for incomplete checkpoints in {self}"):
            return sweep(self.root)

    # Finding

    def list_ids(self, complete: bool = True) -> list[str]:
        """Return the ids of the checkpoints, sorted.

        Args:
            complete: only of those that were written to their end.

        Raises:
            StorageError: the storage can not be read.
        """
        with explain_errors(f"listing {self}"):
            names = [name for name in self.root.list_names() if name != BOOKKEEPING_DIR]
            marker_files = (METADATA_FILE,) if complete else (METADATA_FILE, LOAD_DATA_FILE, *STATE_FILES)
            known = self._in_parallel(lambda name: any((self.root / name / m).exists() for m in marker_files), names)
        return [name for name, is_checkpoint in zip(names, known, strict=True) if is_checkpoint]

    def newest(self, job: str | None = None) -> str | None:
        """Return path or URL of the newest complete checkpoint; None if there is none. See :meth:`newest_first`."""
        return next(self.newest_first(job), None)

    def newest_first(self, job: str | None = None) -> Iterator[str]:
        """Yield paths or URLs of the complete checkpoints, the newest first.

        Of checkpoints that go on from one another it is the one with the most batches. Of runs that do not it is the
        one that was written to last, as the storage's own file times tell.

        Args:
            job: look only at those that a job of this name wrote.

        Raises:
            StorageError: the storage can not be read.
        """

        def ancestry_of(checkpoint_id: str) -> Ancestry | None:
            metadata = self.read_metadata(checkpoint_id)
            if job is not None and metadata.get("job") != job:
                return None
            return Ancestry.from_metadata(checkpoint_id, metadata, self._written(checkpoint_id))

        ids = self.list_ids()
        with explain_errors(f"reading {self}"):
            known = self._in_parallel(ancestry_of, ids)
        for checkpoint_id in newest_first(ancestry for ancestry in known if ancestry is not None):
            yield str(self.root / checkpoint_id)

    def _written(self, checkpoint_id: str) -> float | None:
        try:
            return modified(self.root / checkpoint_id / METADATA_FILE)
        except FileNotFoundError:  # another run has just deleted it
            return None

    def find_missing(self, checkpoint_ids: Sequence[str]) -> list[str]:
        """Return those of the ids of complete checkpoints that are not there.

        Elsewhere than on a local disk all but the last are looked for in one listing, which does not tell whether they
        are complete.

        Raises:
            StorageError: the storage can not be read.
        """
        looked_at = checkpoint_ids if self.is_local else checkpoint_ids[-1:]

        def find() -> list[str]:
            names = self.root.list_names() if checkpoint_ids else []
            torn = {name for name in looked_at if not (self.root / name / METADATA_FILE).exists()}
            return sorted(set(checkpoint_ids) - set(names) | torn, key=checkpoint_ids.index)

        missing: list[str] = self.retry.call(f"looking for checkpoints in {self}", find)
        return missing

    def find(self, id_or_path: str | os.PathLike[str]) -> str:
        """Return path or URL of a checkpoint.

        Args:
            id_or_path: the id of a checkpoint in this storage, or path or URL of any checkpoint's directory.

        Raises:
            CheckpointNotFound: there is none; similar ids are named.
            StorageError: the storage can not be read.
        """
        name = os.fspath(id_or_path)
        place = self._place_of(name)
        if place is None and "/" in name:
            elsewhere = Location.parse(name, self.options)
            with explain_errors(f"looking for {elsewhere}"):
                place = elsewhere if elsewhere.is_dir() else None
        if place is None:
            raise self._not_found(name)
        return str(place)

    def read_metadata(self, checkpoint_id: str) -> dict[str, Any]:
        """Return the content of ``metadata.json``; empty if it is missing or damaged."""
        return read_metadata(self.root / checkpoint_id)

    def describe(self, checkpoint_ids: list[str]) -> list[CheckpointInfo]:
        """Return what can be told of checkpoints without reading them.

        Raises:
            StorageError: the storage can not be read.
        """

        with explain_errors(f"reading {self}"):
            return self._in_parallel(lambda name: describe(self.root / name), checkpoint_ids)

    # Parts

    def _place_of(self, name: str) -> Location | None:
        if name in ("", ".", "..", BOOKKEEPING_DIR) or "/" in name or "\\" in name:
            return None
        with explain_errors(f"looking for {name} in {self}"):
            return self.root / name if (self.root / name).is_dir() else None

    def _not_found(self, name: str) -> errors.CheckpointNotFound:
        known = self.list_ids()
        near = difflib.get_close_matches(name.rstrip("/").rpartition("/")[2], known, n=3, cutoff=0.3)
        hint = f"Similar ids: {', '.join(near)}." if near else f"{len(known)} other checkpoints are there."
        return errors.CheckpointNotFound(
            f"There is no checkpoint {name!r}, neither as a directory nor as an id in {self}. {hint}"
        )

    def _in_parallel(self, function: Callable[[str], Any], names: list[str]) -> list[Any]:
        # A connection such as SFTP's must not be used by two threads at a time.
        if not self.root.is_object_store or len(names) < 2:
            return [function(name) for name in names]
        with concurrent.futures.ThreadPoolExecutor(_PARALLEL) as pool:
            return list(pool.map(function, names))
