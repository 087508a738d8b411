"""One checkpoint written by all ranks together: the chief writes unsharded state, and every rank writes shards."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import describe_file
from det_lightning.checkpoint.format.resume_state import ResumeState
from det_lightning.checkpoint.format.shards import RESUME_ROOT, SHARDED_RESUME_VALUES, STATE_ROOT
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import upload
from det_lightning.checkpoint.storage.writing import ReportWritten
from det_lightning.distributed.sharded_states import take_shards, write_parts
from det_lightning.ranks.distributed_context import DistributedContext

# Size and checksum of files by the path in a checkpoint, as in the manifest.
_Described = dict[str, dict[str, Any]]


def take_shards_of_run(
    weights: dict[str, Any], resume: ResumeState, shards: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], ResumeState]:
    """Return the states of a run without the values of sharded tensors; add the values to ``shards`` by name."""
    values = {name: getattr(resume, name) for name in SHARDED_RESUME_VALUES}
    resume = dataclasses.replace(resume, **take_shards(values, RESUME_ROOT, shards))
    return take_shards(weights, STATE_ROOT, shards), resume


class SharedCheckpoint:
    """A checkpoint with ``content``, written by every rank in part."""

    def __init__(
        self,
        distributed: DistributedContext,
        storage: CheckpointStorage,
        checkpoint_id: str,
        content: CheckpointContent,
    ) -> None:
        self._distributed = distributed
        self._storage = storage
        self._checkpoint = storage.root.checkpoint(checkpoint_id)
        self._content = content

    def write(self, save: Callable[[ReportWritten], object], report_written: ReportWritten | None) -> None:
        """Write the checkpoint; all ranks call this. Raise a ``CheckpointError`` on every rank if a rank cannot write.

        The chief calls ``save`` with a function of the directory: ``save`` writes unsharded state, calls the function,
        and completes the checkpoint. ``report_written`` is called with the directory once every rank has written.
        """
        if self._distributed.rank == 0:
            self._lead(save, report_written)
        else:
            self._follow()

    def _lead(self, save: Callable[[ReportWritten], object], report_written: ReportWritten | None) -> None:
        is_met = False

        def write_together(directory: pathlib.Path) -> None:
            nonlocal is_met
            is_met = True
            self._distributed.broadcast(None)
            self._content.described.update(self._write(directory))
            self._content.shards = {}
            if report_written is not None:
                report_written(directory)

        try:
            save(write_together)
        except errors.CheckpointError as e:
            if not is_met:
                self._distributed.broadcast(e)
            raise

    def _follow(self) -> None:
        error: errors.CheckpointError | None = self._distributed.broadcast(None)
        if error is not None:
            raise error
        if self._storage.is_local:
            self._write(self._checkpoint.local_path)
            return
        with tempfile.TemporaryDirectory(prefix="det_lightning-part-") as folder:
            self._write(pathlib.Path(folder))

    def _write(self, directory: pathlib.Path) -> _Described:
        """Write the part of this rank; return the files of all ranks."""
        outcome: _Described | str
        try:
            outcome = self._write_own(directory)
        except (errors.CheckpointError, OSError, RuntimeError, NotImplementedError) as e:
            outcome = f"{e!s:.2000}"
        outcomes = self._distributed.allgather(outcome)
        failed = {rank: found for rank, found in enumerate(outcomes) if isinstance(found, str)}
        if failed:
            said = "; ".join(f"rank {rank}: {message}" for rank, message in failed.items())
            raise errors.CheckpointError(f"Checkpoint {self._checkpoint} cannot be written: {said}.")
        return {name: entry for found in outcomes if isinstance(found, dict) for name, entry in found.items()}

    def _write_own(self, directory: pathlib.Path) -> _Described:
        names = write_parts(self._content.shards, directory, self._distributed.rank)
        described = {name: describe_file(directory / name) for name in names}
        if not self._storage.is_local and self._distributed.rank != 0:
            upload(directory, names, self._checkpoint)
        return described
