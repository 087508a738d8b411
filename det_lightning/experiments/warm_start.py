"""The checkpoint that the trials of an experiment start from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.escaping import escape
from det_lightning.experiments.directory import find_experiments

_FIELD = "searcher.source_checkpoint_uuid"


def find_source(checkpoint: str | None, storage: Mapping[str, Any] | None, experiments: Path) -> str | None:
    """Return the checkpoint that trials start from: its absolute path or URL, or its id in the storage.

    Args:
        checkpoint: an id, an absolute path or a URL; None if trials start from scratch.
        storage: where to look for an id; None if the experiment stores its checkpoints in its own new directory.
        experiments: the directory with the experiments, which may have such storages of their own: an id is looked for
            there first.

    Raises:
        ExperimentError: it does not exist, or is a relative path.
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
    return _require(checkpoint, storage or Path().absolute())


def _find_id(checkpoint_id: str, storage: Mapping[str, Any] | None, experiments: Path) -> str:
    path = storage.get("container_path") if storage is not None and storage["type"] == "directory" else None
    is_relative = path is not None and not Path(path).is_absolute()
    for directory in find_experiments(experiments):
        own = CheckpointStorage(directory.path / path if path is not None else directory.checkpoints)
        if own.is_complete(checkpoint_id):
            return own.find(checkpoint_id)
    if storage is not None and not is_relative:
        return _require(checkpoint_id, storage)
    reason = (
        f"checkpoint_storage.container_path is the relative path {path!r}, one in an experiment's own directory"
        if is_relative
        else "the configuration names no checkpoint_storage to look for it in"
    )
    raise errors.ExperimentError(
        f"{_FIELD} is the id {checkpoint_id!r}, but no experiment in {escape(experiments)} has a complete checkpoint "
        f"with this id, and {reason}. Write the checkpoint's absolute path or URL."
    )


def _require(checkpoint: str, storage: Mapping[str, Any] | Path) -> str:
    try:
        CheckpointStorage(storage).find(checkpoint)
    except errors.CheckpointNotFound as e:
        raise errors.ExperimentError(f"{_FIELD}: {e}") from e
    return checkpoint
