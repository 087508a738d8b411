"""The checkpoint that the trials of an experiment start from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage

_FIELD = "searcher.source_checkpoint_uuid"


def require_source(checkpoint: str | None, storage: Mapping[str, Any] | None) -> None:
    """Raise an error unless the checkpoint that trials start from exists.

    Args:
        checkpoint: an id, an absolute path or a URL; None if trials start from scratch.
        storage: where to look for an id; None if the experiment stores its checkpoints in its own new directory.

    Raises:
        ExperimentError: it does not exist, is an id without a storage that exists already, or is a relative path.
    """
    if checkpoint is None:
        return
    if "/" not in checkpoint and storage is None:
        raise errors.ExperimentError(
            f"{_FIELD} is the id {checkpoint!r}, but the configuration names no checkpoint_storage to look for it in. "
            "Add one, or write the checkpoint's absolute path or URL."
        )
    path = storage.get("container_path") if storage is not None and storage["type"] == "directory" else None
    if "/" not in checkpoint and path is not None and not Path(path).is_absolute():
        raise errors.ExperimentError(
            f"{_FIELD} is the id {checkpoint!r}, but checkpoint_storage.container_path is the relative path {path!r}, "
            "which is one in the experiment's own new directory. Write the checkpoint's absolute path or URL."
        )
    if "/" in checkpoint and "://" not in checkpoint and not Path(checkpoint).expanduser().is_absolute():
        raise errors.ExperimentError(
            f"{_FIELD} is the relative path {checkpoint!r}, and trials have working directories of their own. Write "
            f"an absolute path, such as {Path(checkpoint).absolute()}, or a URL, or an id in checkpoint_storage."
        )
    try:
        CheckpointStorage(storage or Path().absolute()).find(checkpoint)
    except errors.CheckpointNotFound as e:
        raise errors.ExperimentError(f"{_FIELD}: {e}") from e
