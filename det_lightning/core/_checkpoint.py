"""Checkpoints of a script: directories of arbitrary files in a storage, with metadata."""

from __future__ import annotations

import contextlib
import enum
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

from det_lightning.arguments import find_member, is_path, require
from det_lightning.checkpoint.storage.checkpoint_info import CheckpointInfo
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import Location
from det_lightning.checkpoint.storage.staging import StagingDirectory
from det_lightning.core._reports import find_mistakes_in_steps
from det_lightning.core._shards import (
    Selector,
    choose_share,
    fail_together,
    fetch,
    list_stored,
    merge_metadata,
    put,
    run_on_local_chief,
    share_directory,
)
from det_lightning.core._task import TrialTask
from det_lightning.core._with_statement import for_with_statement
from det_lightning.escaping import get_logger
from det_lightning.files.plain_values import as_plain
from det_lightning.files.strict_json import spell_numbers
from det_lightning.ranks.distributed_context import DistributedContext

logger = get_logger(__name__)

_AN_ID = "the id, path or URL of a checkpoint"


class DownloadMode(enum.Enum):
    """Whether the ranks of a machine download one copy of a checkpoint together, or one each.

    Example:
        >>> import pathlib
        >>> import det_lightning as det
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     with core_context.checkpoint.store_path({"steps_completed": 1}) as (path, storage_id):
        ...         _ = (path / "state.txt").write_text("0.5")
        ...     own_copy = f"copy_of_rank_{core_context.distributed.rank}"
        ...     core_context.checkpoint.download(storage_id, own_copy, det.core.DownloadMode.NoSharedDownload)
        >>> pathlib.Path("copy_of_rank_0", "state.txt").read_text()
        '0.5'
    """

    LocalWorkersShareDownload = "LOCAL_WORKERS_SHARE_DOWNLOAD"
    NoSharedDownload = "NO_SHARED_DOWNLOAD"


class CheckpointContext:
    """Uploads and downloads checkpoints: directories of arbitrary files, named by checkpoint ids.

    A checkpoint is complete once its last file, ``metadata.json``, is written.

    Attributes:
        storage: the storage of the checkpoints.

    Example:
        >>> import det_lightning as det
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     with core_context.checkpoint.store_path({"steps_completed": 1}) as (path, storage_id):
        ...         _ = (path / "state.txt").write_text("0.5")
        ...     with core_context.checkpoint.restore_path(storage_id) as path:
        ...         (path / "state.txt").read_text()
        '0.5'
    """

    def __init__(
        self, distributed: DistributedContext, storage: CheckpointStorage, task: TrialTask | None = None
    ) -> None:
        self._distributed = distributed
        self.storage = storage
        self._task = task

    def upload(
        self,
        ckpt_dir: str | os.PathLike[str] | None,
        metadata: dict[str, Any] | None = None,
        *,
        shard: bool = False,
        selector: Selector | None = None,
    ) -> str:
        """Copy the files of a directory into a new checkpoint, and return the checkpoint's id.

        Args:
            ckpt_dir: the directory; with ``shard``, None on ranks without files.
            metadata: facts about the checkpoint, as JSON can hold. A trial of an experiment must include
                ``steps_completed``.
            shard: all ranks call this, each with its files. Otherwise only the chief may.
            selector: called with each path in the directory, returns whether to copy; directories end in ``/``.

        Raises:
            RuntimeError: a rank other than the chief calls this without ``shard``, there is no directory, or the ranks
                contribute different files of the same name or different metadata.
            ValueError: in a trial of an experiment, ``steps_completed`` is missing, or no whole number from 0 on.
            TypeError: JSON cannot hold the metadata.
            StorageError: the storage refuses.
        """
        expected = "the path of a directory and the metadata, in this order"
        require(ckpt_dir is None or is_path(ckpt_dir), "checkpoint.upload()", expected, ckpt_dir)
        ranks = self._require_contributors("upload", shard)
        if ckpt_dir is None and not shard:
            raise RuntimeError("upload(ckpt_dir=None) needs shard=True, and a directory on at least one rank.")
        if ckpt_dir is None and selector is not None:
            raise RuntimeError("upload(ckpt_dir=None, selector=...) has no files to select.")
        directory = None if ckpt_dir is None else pathlib.Path(ckpt_dir)
        names = choose_share(ranks, directory, selector)
        merged = self._merge_metadata(ranks, metadata)
        staging, target = self._begin(ranks)
        with staging or contextlib.nullcontext():
            self._announce(ranks, staging)
            if directory is not None:
                put(directory, names, target)
            ranks.allgather(None)  # all files are there
        self._complete(ranks, staging, target, merged)
        return target.name

    @for_with_statement("with core_context.checkpoint.store_path(...) as (directory, checkpoint_id)")
    def store_path(
        self, metadata: dict[str, Any] | None = None, *, shard: bool = False
    ) -> Iterator[tuple[pathlib.Path, str]]:
        """Write a checkpoint in a ``with`` block: the files in the directory, unless the block raises.

        Args:
            metadata: see :meth:`upload`.
            shard: all ranks enter the block. Otherwise only the chief may.

        Yields:
            The directory, shared by the ranks on a machine, and the id.

        Raises:
            RuntimeError, ValueError, TypeError, StorageError: see :meth:`upload`.
        """
        ranks = self._require_contributors("store_path", shard)
        staging, target = self._begin(ranks)
        with staging or contextlib.nullcontext(), share_directory(ranks, staging, target) as directory:
            with fail_together(ranks):
                yield directory, target.name
            merged = self._merge_metadata(ranks, metadata)
            if not target.is_local:
                self._announce(ranks, staging)
                put(directory, choose_share(ranks, directory, None), target)
                ranks.allgather(None)
        self._complete(ranks, staging, target, merged)

    def download(
        self,
        storage_id: str,
        ckpt_dir: str | os.PathLike[str],
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> None:
        """Copy a checkpoint into a directory, created if missing.

        Args:
            storage_id: the checkpoint's id, or the path or URL of any checkpoint.
            ckpt_dir: the directory.
            download_mode: whether the first rank of each machine copies the checkpoint for all.
            selector: called with each path in the checkpoint, returns whether to copy the path; directories end in
                ``/``. Ranks with a shared copy get the paths that any rank selects.

        Raises:
            CheckpointNotFound: there is no checkpoint with this id.
            StorageError: the storage cannot be read.
            RuntimeError: the rank that copies the checkpoint has failed.
        """
        ranks = self._share("download", storage_id, download_mode)
        names = self._select(ranks, storage_id, selector)
        run_on_local_chief(ranks, lambda: fetch(self._find(storage_id), names, pathlib.Path(ckpt_dir)))

    @for_with_statement("with core_context.checkpoint.restore_path(...) as directory")
    def restore_path(
        self,
        storage_id: str,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> Iterator[pathlib.Path]:
        """Provide a checkpoint as a directory during a ``with`` block; a remote one is copied.

        Args:
            storage_id: the checkpoint's id, or the path or URL of any checkpoint.
            download_mode, selector: see :meth:`download`. A local checkpoint is the directory itself, with all files.

        Yields:
            The directory, not to be changed.

        Raises:
            CheckpointNotFound, StorageError, RuntimeError: see :meth:`download`.
        """
        ranks = self._share("restore_path", storage_id, download_mode)
        with contextlib.ExitStack() as stack:
            location = run_on_local_chief(ranks, lambda: self._find(storage_id))
            if location.is_local:
                if selector is not None:
                    logger.warning("%s is on a disk, so the selector has no effect.", location)
                directory = location.local_path
            else:
                copy = run_on_local_chief(ranks, lambda: stack.enter_context(tempfile.TemporaryDirectory()))
                directory = pathlib.Path(copy)
                self.download(storage_id, directory, download_mode, selector=selector)
            stack.callback(ranks.gather_local, None)  # waits until nobody uses the copy any more
            yield directory

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """Return the metadata of a checkpoint, empty if there are none; for errors see :meth:`download`."""
        return CheckpointInfo(self._find(storage_id)).metadata

    def delete(self, storage_id: str) -> None:
        """Remove a checkpoint; do nothing if there is none.

        Raises:
            CheckpointNotFound: the directory with this id is not a checkpoint and stays.
            StorageError: the storage refuses.
        """
        require(is_path(storage_id), "checkpoint.delete()", _AN_ID, storage_id)
        if not self.storage.root.checkpoint(storage_id).is_dir():
            logger.info("There is no checkpoint %s in %s.", storage_id, self.storage)
            return
        self.storage.delete(storage_id)
        logger.info("Checkpoint %s was deleted.", storage_id)
        if self._task is not None:
            self._task.report("checkpoint_deleted", None, {"checkpoint_id": storage_id})

    def _require_contributors(self, method: str, shard: bool) -> DistributedContext:
        if not shard and self._distributed.rank != 0:
            raise RuntimeError(
                f"{method}(shard=False) was called by rank {self._distributed.rank}; only the chief, rank 0, may. With "
                "shard=True all ranks must."
            )
        return self._distributed if shard else DistributedContext()

    def _share(self, method: str, storage_id: str, mode: DownloadMode) -> DistributedContext:
        require(is_path(storage_id), f"checkpoint.{method}()", _AN_ID, storage_id)
        shares = find_member("download_mode=", DownloadMode, mode) is DownloadMode.LocalWorkersShareDownload
        return self._distributed if shares else DistributedContext()

    def _begin(self, ranks: DistributedContext) -> tuple[StagingDirectory | None, Location]:
        """Return the staging directory of a new checkpoint, on the chief only, and the checkpoint's location."""
        staging = self.storage.stage() if ranks.rank == 0 else None
        checkpoint_id = ranks.broadcast(None if staging is None else staging.directory.name)
        return staging, self.storage.root.checkpoint(checkpoint_id)

    def _announce(self, ranks: DistributedContext, staging: StagingDirectory | None) -> None:
        """Mark the checkpoint in a remote storage before any rank uploads, so that leftovers are found after a kill."""
        if not self.storage.is_local:
            with fail_together(ranks):
                if staging is not None:
                    staging.announce()

    def _merge_metadata(self, ranks: DistributedContext, metadata: dict[str, Any] | None) -> dict[str, Any]:
        require(metadata is None or isinstance(metadata, dict), "metadata=", "a dict", metadata)
        merged = merge_metadata(ranks.allgather(metadata or {}))
        if self._task is not None and "steps_completed" not in merged:
            raise ValueError(
                "The metadata of a checkpoint must have 'steps_completed', the number of batches trained; got "
                f"{', '.join(merged) or 'none'}."
            )
        # Raises a TypeError before anything is written.
        plain: dict[str, Any] = spell_numbers(as_plain(merged, "metadata"))
        for mistake in [] if self._task is None else find_mistakes_in_steps(plain["steps_completed"]):
            raise ValueError(f"In the metadata of a checkpoint {mistake}.")
        return plain

    def _complete(
        self, ranks: DistributedContext, staging: StagingDirectory | None, target: Location, metadata: dict[str, Any]
    ) -> None:
        """Write the manifest; no rank returns before."""
        with fail_together(ranks):
            if staging is not None:
                self._commit(staging, metadata)
        if staging is None:
            return
        logger.info("Checkpoint %s is in %s.", target.name, self.storage)
        if self._task is not None:
            self._task.report("checkpoint", metadata["steps_completed"], {"checkpoint_id": target.name})

    def _commit(self, staging: StagingDirectory, metadata: dict[str, Any]) -> None:
        with staging:
            if self._task is not None:
                self._task.report_begun(staging.directory.name, metadata["steps_completed"], self.storage)
            staging.commit(metadata)

    def _find(self, storage_id: str) -> Location:
        return Location.parse(self.storage.find(storage_id), self.storage.options)

    def _select(self, ranks: DistributedContext, storage_id: str, selector: Selector | None) -> list[str]:
        """Return the files that any rank of this machine selects."""
        names: list[str] = run_on_local_chief(ranks, lambda: list_stored(self._find(storage_id)))
        wanted = None if selector is None else [name for name in names if selector(name)]
        of_ranks = ranks.allgather_local(wanted)
        return names if None in of_ranks else sorted({name for chosen in of_ranks for name in chosen})
