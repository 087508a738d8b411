"""Decides from which checkpoint the trials of an experiment start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.storage_config import LOCAL_TYPES
from det_lightning.experiments.directory import find_experiments

_FIELD = "searcher.source_checkpoint_uuid"


def find_source(checkpoint: str | None, storage: Mapping[str, Any] | None, experiments: Path) -> str | None:
    """Return the checkpoint to start trials from: an absolute path or URL, or an id in the storage.

    Args:
        checkpoint: an id, an absolute path or a URL; None to start from scratch.
        storage: the storage of ids; None if the experiment stores checkpoints in the new directory.
        experiments: the directory of experiments; local storages there are searched for an id that ``storage`` lacks.

    Raises:
        ExperimentError: the checkpoint does not exist, or the path is relative.
    """
    if checkpoint is None:
        return None
    if "/" not in checkpoint:
        return _find_id(checkpoint, storage, experiments)
    if "://" not in checkpoint and not Path(checkpoint).expanduser().is_absolute():
        raise errors.ExperimentError(
            f"{_FIELD} is the relative path {checkpoint!r}, and trials have working directories of their own. Write "
            f"an absolute path, such as {Path(checkpoint).absolute()}, or a URL, or an id."
        )
    try:
        CheckpointStorage(storage or Path().absolute()).find(checkpoint)
    except errors.CheckpointNotFound as e:
        raise errors.ExperimentError(f"{_FIELD}: {e}") from e
    return checkpoint


def _find_id(checkpoint_id: str, storage: Mapping[str, Any] | None, experiments: Path) -> str:
    reason = "a checkpoint_storage that is missing or relative is the new experiment's own, and empty."
    # A relative path begins at the experiment's own new directory.
    if storage is not None and Path(storage.get("container_path") or "/").is_absolute():
        try:
            CheckpointStorage(storage).find(checkpoint_id)
            return checkpoint_id
        except errors.CheckpointNotFound as e:
            reason = str(e)
    for local in _find_local_storages(experiments):
        with contextlib.suppress(errors.StorageError):
            if local.is_complete(checkpoint_id):
                return local.find(checkpoint_id)
    raise errors.ExperimentError(
        f"{_FIELD} is the id {checkpoint_id!r}: {reason} No experiment in {experiments} has this checkpoint, either. "
        "Write the checkpoint's absolute path or URL."
    )


def _find_local_storages(experiments: Path) -> Iterator[CheckpointStorage]:
    """Yield the readable local storages of the experiments in a directory."""
    for directory in find_experiments(experiments):
        with contextlib.suppress(OSError, errors.DamagedExperiment):
            storage = directory.checkpoint_storage()
            if isinstance(storage, str) or storage["type"] in LOCAL_TYPES:
                yield CheckpointStorage(storage)
