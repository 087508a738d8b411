"""Reading a whole checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import (
    FILES_READ,
    LIGHTNING_FILE,
    RESUME_FILE,
    find_state_file,
    require_complete,
)
from det_lightning.checkpoint.format.manifest import find_damage, require_unchanged
from det_lightning.checkpoint.format.resume_state import ResumeState
from det_lightning.checkpoint.format.upgrade import collect_load_data
from det_lightning.checkpoint.safe_load.nan_weights import warn_of_nan
from det_lightning.checkpoint.safe_load.state_file import read_state
from det_lightning.checkpoint.safe_load.trial_state_file import read_trial_state
from det_lightning.checkpoint.storage.local_copy import open_checkpoint
from det_lightning.checkpoint.storage.location import Location

__all__ = ["load_checkpoint", "read_checkpoint", "read_resume"]

logger = logging.getLogger("det_lightning.checkpoint")


def load_checkpoint(
    url: str | os.PathLike[str], options: Mapping[str, Any] | None = None, *, trusted: bool = False
) -> CheckpointContent:
    """Read the checkpoint at a path or URL; see :func:`read_checkpoint`.

    Args:
        url: of the checkpoint's own directory.
        options: see ``CheckpointStorage``.
        trusted: unpickle anything, running whatever code the files ask for.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        StorageError: the place can not be reached.
        IncompleteCheckpointError, UnsafeCheckpointError: see :func:`read_checkpoint`.
    """
    with open_checkpoint(url, options) as directory:
        content = read_checkpoint(directory, trusted=trusted)
    place = Location.parse(url, options)
    if place.is_local:
        return content
    return dataclasses.replace(content, source=f"{place}/{pathlib.Path(content.source).relative_to(directory)}")


def read_checkpoint(directory: pathlib.Path, *, trusted: bool = False) -> CheckpointContent:
    """Read the checkpoint in ``directory``, of any release since 0.12.

    Args:
        directory: a checkpoint's own directory.
        trusted: unpickle anything, running whatever code the files ask for.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        IncompleteCheckpointError: it was not written to its end, or is damaged.
        UnsafeCheckpointError: it refers to code and is not ``trusted``.
    """
    require_complete(directory)
    state_file = find_state_file(directory)
    trial_state, epochs_known = read_trial_state(directory, trusted=trusted)

    state = read_state(state_file, trusted=trusted)
    warn_of_nan(state, str(state_file))
    lightning = directory / LIGHTNING_FILE
    content = CheckpointContent(
        state=state,
        trial_state=trial_state,
        resume=read_resume(directory, trusted=trusted),
        lightning=read_state(lightning, trusted=trusted) if lightning.is_file() else None,
        load_data=collect_load_data(directory),
        epochs_known=epochs_known,
        name=directory.name,
        source=str(state_file),
        directory=directory,
    )
    # Last, for a file that was exchanged may be worse than damaged, and the readers tell.
    _compare_with_manifest(directory, trusted)
    return content


def read_resume(directory: pathlib.Path, *, trusted: bool = False) -> ResumeState | None:
    """Read what the checkpoint in ``directory`` has for an exact resume; None if Determined wrote it.

    Args:
        directory: a checkpoint's own directory.
        trusted: unpickle anything, running whatever code the file asks for.

    Raises:
        InvalidCheckpointException: a newer release wrote it.
        IncompleteCheckpointError: it is damaged.
        UnsafeCheckpointError: it refers to code and is not ``trusted``.
    """
    path = directory / RESUME_FILE
    return ResumeState.from_dict(read_state(path, trusted=trusted), str(path)) if path.is_file() else None


def _compare_with_manifest(directory: pathlib.Path, trusted: bool) -> None:
    if not trusted:
        require_unchanged(directory, FILES_READ)
    elif damage := find_damage(directory, FILES_READ):
        logger.warning("The trusted checkpoint %s is not as it was written: %s.", directory, "; ".join(damage))
