"""A storage of checkpoints, a directory for each, named by the id; opening any of them as a local directory."""

from __future__ import annotations

import contextlib
import difflib
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.storage import checkpoint_info, staging
from det_lightning.checkpoint.storage.checkpoint_info import CheckpointInfo
from det_lightning.checkpoint.storage.location import (
    Location,
    Progress,
    download,
    explain_errors,
    is_name,
    new_id,
    require_checkpoint_path,
)
from det_lightning.checkpoint.storage.storage_config import storage_from_config
from det_lightning.escaping import get_logger, name_type
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
    ) -> None:
        url, self.options = resolve_storage(root, dict(options or {}))
        self.root = Location.parse(url, self.options)
        self.is_local = self.root.is_local

    def __str__(self) -> str:
        return str(self.root)

    def write(
        self,
        content: CheckpointContent,
        checkpoint_id: str | None = None,
        code: CodeSource = None,
        report_written: ReportWritten | None = None,
    ) -> str:
        """Write a checkpoint and return the id; ``metadata.json`` comes last, and earlier checkpoints stay untouched.

        After any failure the written files are removed.

        Args:
            content: the content.
            checkpoint_id: the id; by default a new one.
            code: the directory to copy to ``code/``, without secrets and results; by default the working directory.
            report_written: called with the directory once all files but the last are written; may add files.

        Raises:
            CheckpointNotFound: no checkpoint can have this id.
            CheckpointError: the files cannot be written.
            StorageError: the storage failed for good; a complete copy stays on this machine, and the message says
                where.

        Example:
            >>> from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState
            >>> storage = CheckpointStorage("checkpoints")
            >>> checkpoint_id = storage.write(CheckpointContent({}, TrialState(batches_trained=100)))
            >>> storage.newest() == storage.find(checkpoint_id)
            True
        """
        from det_lightning.checkpoint.format.code_copy import CodeCopier
        from det_lightning.checkpoint.storage import writing  # imports torch

        copier = code if isinstance(code, CodeCopier) else CodeCopier(code)
        staged = self.stage(checkpoint_id)
        writing.write_files(staged, content, copier, report_written)
        return writing.complete(staged, content, copier)

    def stage(self, checkpoint_id: str | None = None) -> staging.StagingDirectory:
        """Return a new staging directory, for a checkpoint whose files the caller writes into ``directory``.

        Its ``commit`` writes ``metadata.json``, the last file, and completes the checkpoint; ``abandon``, and any error
        in a ``with`` block, removes what was written.

        Raises:
            CheckpointNotFound: no checkpoint can have this id.
            CheckpointError: the directory cannot be made.
        """
        return staging.open_staging(self.root, new_id() if checkpoint_id is None else checkpoint_id)

    def require_writable(self) -> None:
        """Raise a ``StorageError`` with the reason unless the storage can be written to, before hours of training."""
        if self.root.is_local and self.root.local_path.is_file():
            raise errors.StorageError(
                f"{self.root} is a file, and no checkpoints can be written to it: a storage is a directory, or a URL "
                "such as s3://bucket/prefix."
            )
        content = b"to see whether it can be written"
        with explain_errors("trying to write to", self.root):
            if self.root.is_local:
                self.root.local_path.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.root.local_path) as file:
                    file.write(content)
            else:
                probe = self.root.bookkeeping(f"probe-{new_id()}")
                probe.write(content)
                probe.remove()

    def delete(self, checkpoint_id: str) -> None:
        """Remove a checkpoint. An interruption leaves an incomplete checkpoint, never a damaged one.

        Raises:
            CheckpointNotFound: there is none with this id, or the directory is not a checkpoint; nothing was removed.
        """
        directory = self._find_directory(checkpoint_id)
        if directory is None:
            raise self._describe_unknown(checkpoint_id)
        staging.delete(self.root, directory)

    def replace(self, checkpoint_id: str, by: str) -> None:
        """Give the complete checkpoint ``by`` the id ``checkpoint_id``, and remove a checkpoint or link with this id.

        At any time at least one of the two exists.

        Raises:
            CheckpointNotFound: an id is invalid, or the directory ``checkpoint_id`` is not a checkpoint.
        """
        old = self.root.checkpoint(checkpoint_id)
        new = self.root.checkpoint(by)
        with explain_errors(f"replacing {old} by", new):
            staging.replace(self.root, old, new)

    def remove_leftovers(self) -> list[str]:
        """Remove the incomplete checkpoints of killed writers; return the ids."""
        if not self.is_local:
            staging.remove_dead_stagings()
        with explain_errors("looking for incomplete checkpoints in", self.root):
            return staging.remove_leftovers(self.root)

    def list_ids(self, complete: bool = True) -> list[str]:
        """Return the sorted ids of the checkpoints, without links, and if ``complete`` without incomplete ones."""
        with explain_errors("listing", self.root):
            return [info.id for info in checkpoint_info.scan(self.root, complete)]

    def list_checkpoints(self, complete: bool = True) -> list[CheckpointInfo]:
        """Return the facts about the checkpoints, sorted by id, without links; see :meth:`list_ids`."""
        with explain_errors("listing", self.root):
            found = checkpoint_info.scan(self.root, complete)
            checkpoint_info.call_in_parallel(self.root, lambda info: info.metadata, found)
        return found

    def info(self, checkpoint_id: str) -> CheckpointInfo:
        """Return the facts about a checkpoint, which need not exist."""
        return CheckpointInfo(self.root.checkpoint(checkpoint_id))

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

        Newest is what was written last, by the time in the metadata; a time that lies in the future does not count.
        """
        with explain_errors("reading", self.root):
            found = checkpoint_info.scan(self.root, complete=True)
        for info in checkpoint_info.newest_first(found):
            if job is None or info.metadata.get("job") == job:
                yield info.directory.url

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
                checkpoint_info.require_checkpoint(directory)
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

    def _find_directory(self, name: str) -> Location | None:
        if not is_name(name):
            return None
        directory = self.root.checkpoint(name)
        with explain_errors("looking for", directory):
            return directory if directory.is_dir() else None


def resolve_storage(root: Any, options: dict[str, Any]) -> tuple[str | os.PathLike[str], dict[str, Any]]:
    """Return the path or URL of a storage, and the options of the file system; see ``CheckpointStorage``."""
    if isinstance(root, Mapping):
        root, options = storage_from_config(root, options)
    if root is None:
        import platformdirs  # here, because it is rarely needed

        root = platformdirs.user_data_dir("determined")
    if not isinstance(root, str | os.PathLike):
        raise TypeError(
            "checkpoint_storage must be a directory, a URL such as s3://bucket/prefix, the section checkpoint_storage "
            f"of a configuration, or None for the default; got {name_type(root)}."
        )
    if root == "":  # as from a variable that is not set
        raise ValueError(
            "The storage of checkpoints must not be empty: pass a directory or a URL, or None for the default."
        )
    return root, options


@contextlib.contextmanager
def open_checkpoint(
    url: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    *,
    with_code: bool = False,
    progress: Progress | None = None,
) -> Iterator[pathlib.Path]:
    """Yield a checkpoint as a local directory; a remote checkpoint is downloaded for the time of the ``with`` block.

    Args:
        url: path or URL of the checkpoint's directory.
        options: see ``CheckpointStorage``.
        with_code: download ``code/`` too.
        progress: called with the name and the size in bytes of each downloaded file.

    Raises:
        CheckpointNotFound: there is no such directory.
        StorageError: the directory cannot be read.
        UnsafeCheckpointError: file names lead out of the directory.

    Example:
        >>> from det_lightning.checkpoint import CheckpointContent, CheckpointStorage
        >>> from det_lightning.checkpoint import TrialState, open_checkpoint
        >>> storage = CheckpointStorage("checkpoints")
        >>> _ = storage.write(CheckpointContent({}, TrialState(batches_trained=100)))
        >>> with open_checkpoint(storage.newest()) as directory:
        ...     sorted(path.name for path in directory.glob("*.json"))
        ['load_data.json', 'metadata.json']
    """
    if not isinstance(url, str | os.PathLike):
        require_checkpoint_path(url)
    location = Location.parse(url, options)
    if location.is_local:
        if not location.local_path.is_dir():
            raise errors.CheckpointNotFound(f"There is no checkpoint directory {location}.")
        is_complete = (location.local_path / layout.METADATA_FILE).exists()
        if not is_complete:
            checkpoint_info.require_checkpoint(location)
        # Resuming from a link means resuming from its target.
        with _explain_vanishing(location, is_complete):
            yield location.resolve_link().local_path
        return
    if not is_name(location.name):
        raise errors.CheckpointNotFound(f"{location.name!r} in {location} cannot be the name of a checkpoint.")
    checkpoint_info.require_checkpoint(location)
    with explain_errors("reading", location):
        files = location.find_files()
    names = [name for name in files if with_code or not name.startswith(f"{layout.CODE_DIR}/")]
    if not names:
        raise errors.CheckpointNotFound(f"There is no checkpoint directory {location}.")
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as folder:
        directory = pathlib.Path(folder) / location.name
        directory.mkdir()
        with _explain_vanishing(location, layout.METADATA_FILE in files):
            download(location, names, directory, progress)
        yield directory


@contextlib.contextmanager
def _explain_vanishing(checkpoint: Location, is_complete: bool) -> Iterator[None]:
    """If a checkpoint was deleted while it was read, raise an error that says so."""
    try:
        yield
    except (errors.CheckpointError, OSError) as e:
        # The metadata go first.
        with explain_errors("looking for", checkpoint):
            is_there = (checkpoint / layout.METADATA_FILE).exists() if is_complete else checkpoint.is_dir()
        if is_there:
            raise
        raise errors.CheckpointNotFound(
            f"Checkpoint {checkpoint} was deleted while it was read, by the retention of a run or by hand. Use another "
            "checkpoint."
        ) from e
