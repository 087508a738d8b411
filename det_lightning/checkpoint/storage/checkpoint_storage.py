"""A storage of checkpoints: a directory for each, named by the id, below a common root."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.storage import ancestry, metadata, removal, staging, survey
from det_lightning.checkpoint.storage.location import Location, explain_errors, is_name, new_id, require_checkpoint_path
from det_lightning.checkpoint.storage.storage_config import resolve_storage
from det_lightning.checkpoint.storage.transfer import RetryPolicy, require_writable
from det_lightning.escaping import get_logger
from det_lightning.masking import mask_url

if TYPE_CHECKING:
    from det_lightning.checkpoint.format.code_copy import CodeCopier
    from det_lightning.checkpoint.format.content import CheckpointContent
    from det_lightning.checkpoint.storage.writing import ReportWritten

    CodeSource = str | os.PathLike[str] | CodeCopier | None

logger = get_logger(__name__)


class CheckpointStorage:
    """A directory of checkpoints, on this machine or on any file system that fsspec supports.

    The layout is Determined's: a directory or bucket of Determined can be opened unchanged. Every method raises
    ``StorageError`` if the storage cannot be read.

    Args:
        root: a directory, a URL such as ``s3://bucket/prefix``, or the ``checkpoint_storage`` section of an experiment
            configuration. By default the directory that Determined uses for local runs.
        options: options of the file system, such as ``{"endpoint_url": ...}`` or credentials; see the documentation of
            s3fs, gcsfs, adlfs, ...
        retry: how often to try a transfer.

    Raises:
        StorageError: the URL cannot be opened, or a library is not installed.
        ValueError: the configuration is wrong, and the message lists all mistakes; or the text is empty.

    Example:
        >>> from det_lightning.checkpoint import CheckpointStorage
        >>> storage = CheckpointStorage("checkpoints")
        >>> storage.list_ids(), storage.newest()
        ([], None)
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        url, self.options = resolve_storage(root, dict(options or {}))
        self.root = Location.parse(url, self.options)
        self.is_local = self.root.is_local
        self.retry = retry or RetryPolicy()

    def __str__(self) -> str:
        return str(self.root)

    def limit_retries_when(self, is_ending: Callable[[], bool]) -> None:
        """Retry failing transfers only briefly once ``is_ending`` says that the process was asked to end."""
        self.retry = dataclasses.replace(self.retry, is_ending=is_ending)

    def write(
        self,
        content: CheckpointContent,
        checkpoint_id: str | None = None,
        code: CodeSource = None,
        report_written: ReportWritten | None = None,
    ) -> str:
        """Write a checkpoint and return the id; see :meth:`begin` and :meth:`commit`.

        Example:
            >>> from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState
            >>> storage = CheckpointStorage("checkpoints")
            >>> checkpoint_id = storage.write(CheckpointContent({}, TrialState(batches_trained=100)))
            >>> storage.newest() == storage.find(checkpoint_id)
            True
        """
        return self.commit(self.begin(checkpoint_id, content, code, report_written))

    def begin(
        self,
        checkpoint_id: str | None = None,
        content: CheckpointContent | None = None,
        code: CodeSource = None,
        report_written: ReportWritten | None = None,
    ) -> staging.StagingDirectory:
        """Return a new staging directory, with all files of a checkpoint but the last.

        After any failure the written files are removed; earlier checkpoints stay untouched.

        Args:
            checkpoint_id: the id; by default a new one.
            content: the content; without content the caller writes the files, and gives :meth:`commit` the metadata.
            code: the directory to copy to ``code/``, without secrets and results; by default the working directory.
            report_written: called with the directory once all files but the last are written; may add files.

        Raises:
            CheckpointNotFound: no checkpoint can have this id.
            CheckpointError: the files cannot be written.
        """
        new = new_id() if checkpoint_id is None else checkpoint_id
        begun: staging.StagingDirectory
        try:
            begin_at = staging.LocalStaging if self.is_local else staging.RemoteStaging
            begun = begin_at(self.root, new, self.retry)
        except errors.CheckpointError:
            raise
        except OSError as e:
            raise errors.CheckpointError(f"No checkpoint can be written in {self}: {e}") from e
        if content is not None:
            from det_lightning.checkpoint.format.code_copy import CodeCopier
            from det_lightning.checkpoint.storage import writing  # imports torch

            begun.content = content
            begun.code = code if isinstance(code, CodeCopier) else CodeCopier(code)
            writing.write_content(begun, content, begun.code, report_written)
        return begun

    def commit(self, begun: staging.StagingDirectory, metadata: Mapping[str, Any] | None = None) -> str:
        """Complete the checkpoint in a staging directory with ``metadata.json``, the last file. Return the id.

        After any failure the written files are removed.

        Args:
            begun: from :meth:`begin`.
            metadata: the content of ``metadata.json`` if the caller has written the other files.

        Raises:
            CheckpointError: the file cannot be written.
            StorageError: the storage failed for good; a complete copy stays on this machine, and the message says
                where.
        """
        if begun.content is not None and begun.code is not None:
            from det_lightning.checkpoint.storage import writing  # imports torch

            writing.commit_content(begun, begun.content, begun.code)
        else:
            with staging.abandoning(begun, unless=(errors.StorageError,)):
                written = [path for path in begun.directory.rglob("*") if path.is_file()] if self.is_local else []
                begun.commit(dict(metadata or {}), [str(path.relative_to(begun.directory)) for path in written])
        return begun.directory.name

    def require_writable(self) -> None:
        """Raise a ``StorageError`` with the reason unless the storage can be written to, before hours of training."""
        require_writable(self.root, self.retry)

    def delete(self, checkpoint_id: str) -> None:
        """Remove a checkpoint. An interruption leaves an incomplete checkpoint, never a damaged one.

        Raises:
            CheckpointNotFound: there is none with this id, or the directory is not a checkpoint; nothing was removed.
        """
        directory = self.retry.call("looking for", lambda: self._find_directory(checkpoint_id), where=checkpoint_id)
        if directory is None:
            raise self._describe_unknown(checkpoint_id)
        removal.delete(self.root, directory, self.retry)

    def replace(self, checkpoint_id: str, by: str) -> None:
        """Give the complete checkpoint ``by`` the id ``checkpoint_id``, and remove a checkpoint or link with this id.

        At any time at least one of the two exists.

        Raises:
            CheckpointNotFound: an id is invalid, or the directory ``checkpoint_id`` is not a checkpoint.
        """
        old = self.root.checkpoint(checkpoint_id)
        new = self.root.checkpoint(by)
        with explain_errors(f"replacing {old} by", new):
            removal.replace(self.root, old, new, self.retry)

    def remove_abandoned(self, own_only: bool = False) -> list[str]:
        """Remove the incomplete checkpoints of killed writers; return the ids.

        With ``own_only``, leave other users' checkpoints on a local disk.
        """
        if not self.is_local:
            removal.remove_dead_stagings()
        with explain_errors("looking for incomplete checkpoints in", self.root):
            return removal.remove_abandoned(self.root, own_only)

    def list_ids(self, complete: bool = True) -> list[str]:
        """Return the sorted ids of the checkpoints, without links, and if ``complete`` without incomplete ones."""
        if self.root.is_object_store:
            return [info.id for info in self.survey(complete)]
        markers = metadata.list_markers(complete)
        with explain_errors("listing", self.root):
            names = [name for name in self.root.list_names() if is_name(name)]
            return [name for name in names if any((self.root / name / marker).exists() for marker in markers)]

    def list_links(self) -> dict[str, str]:
        """Return the links next to the checkpoints, such as ``latest``, and their targets."""
        with explain_errors("listing", self.root):
            return {name: target for name, target in sorted(self.root.list_links().items()) if is_name(name)}

    def is_complete(self, checkpoint_id: str) -> bool:
        """Return whether there is a complete checkpoint with this id; a link does not count."""
        with explain_errors(f"looking for {checkpoint_id} in", self.root):
            directory = self._find_directory(checkpoint_id)
            if directory is None or directory.link_target() is not None:
                return False
            return (directory / layout.METADATA_FILE).exists()

    def newest(self, job: str | None = None) -> str | None:
        """Return the path or URL of the newest complete checkpoint, or None and perhaps a warning."""
        newest = next(self.newest_first(job), None)
        if newest is None:
            with explain_errors("looking for", self.root):
                if not self.root.is_dir():
                    logger.warning("There is no newest checkpoint: the directory %s does not exist.", self.root)
        return newest

    def newest_first(self, job: str | None = None) -> Iterator[str]:
        """Yield the paths or URLs of the complete checkpoints, of all jobs or of one ``job``, newest first.

        Among runs that resume one another, more batches mean newer; otherwise the run with the last write is newer, by
        the storage's own file times.
        """
        of_job = [info for info in self.glance() if job is None or info.metadata.get("job") == job]
        for checkpoint_id in ancestry.newest_first(map(ancestry.read_ancestry, of_job)):
            yield (self.root / checkpoint_id).url

    def glance(self) -> list[metadata.CheckpointInfo]:
        """Return the facts in each complete checkpoint's ``metadata.json``; faster than :meth:`survey` on a disk."""
        if self.root.is_object_store:
            return self.survey()
        with explain_errors("reading", self.root):
            found = [metadata.glance(self.root / name) for name in self.list_ids()]
        return [info for info in found if info is not None]

    def find(self, id_or_path: str | os.PathLike[str]) -> str:
        """Return the path or URL of a checkpoint, or of a link's target.

        Args:
            id_or_path: the id of a checkpoint in this storage, or the path or URL of any checkpoint's directory.

        Raises:
            CheckpointNotFound: there is none; the message names similar ids.
        """
        if not isinstance(id_or_path, str | os.PathLike):
            require_checkpoint_path(id_or_path)
        name = os.fspath(id_or_path)
        directory = self._find_directory(name)
        if directory is None and name:
            elsewhere = Location.parse(name, self.options)
            with explain_errors("looking for", elsewhere):
                directory = elsewhere if elsewhere.is_dir() else None
                has_metadata = (elsewhere / layout.METADATA_FILE).exists()
            if directory is not None and not has_metadata:
                metadata.require_checkpoint(directory)
        if directory is None:
            raise self._describe_unknown(name)
        return directory.resolve_link().url

    def _describe_unknown(self, name: str) -> errors.CheckpointNotFound:
        known = self.list_ids()
        near = difflib.get_close_matches(name.rstrip("/").rpartition("/")[2], known, n=3, cutoff=0.3)
        hint = f"Similar ids: {', '.join(near)}." if near else f"It holds {len(known) or 'no'} checkpoints."
        return errors.CheckpointNotFound(
            f"There is no checkpoint {mask_url(name)!r}, neither as a directory nor as an id in {self.root}. {hint}"
        )

    def read_metadata(self, checkpoint_id: str) -> dict[str, Any]:
        """Return the content of ``metadata.json``; empty if the file is missing or damaged."""
        return metadata.read_metadata(self.root.checkpoint(checkpoint_id))

    def survey(self, complete: bool = True) -> list[metadata.CheckpointInfo]:
        """Return the facts about all checkpoints, sorted by id, without reading the state. Links are left out.

        If ``complete``, incomplete checkpoints are left out. In a bucket, metadata may come from the index, and then
        have no manifest and no experiment configuration.
        """
        if not self.root.is_object_store:
            return self.describe(self.list_ids(complete))
        with explain_errors("listing", self.root):
            found = survey.survey(self.root)
        return [info for info in found if not info.markers.isdisjoint(metadata.list_markers(complete))]

    def describe(self, checkpoint_ids: list[str]) -> list[metadata.CheckpointInfo]:
        """Return the facts about checkpoints without the state."""
        with explain_errors("reading", self.root):
            directories = [self.root.checkpoint(name) for name in checkpoint_ids]
            return metadata.call_in_parallel(self.root, metadata.describe, directories)

    def _find_directory(self, name: str) -> Location | None:
        if not is_name(name):
            return None
        directory = self.root.checkpoint(name)
        with explain_errors("looking for", directory):
            return directory if directory.is_dir() else None
