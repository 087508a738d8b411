"""Reading a whole checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from det_lightning.checkpoint.format.layout import (
    FILES_READ,
    LIGHTNING_FILE,
    RESUME_FILE,
    find_state_file,
    require_complete,
)
from det_lightning.checkpoint.format.manifest import find_damage, require_unchanged
from det_lightning.checkpoint.format.resume_values import require_resume
from det_lightning.checkpoint.format.trial_state import TrialState, read_trial_state
from det_lightning.checkpoint.format.upgrade import read_load_data
from det_lightning.checkpoint.safe_load.nan_weights import warn_of_nan
from det_lightning.checkpoint.safe_load.state_file import read_state
from det_lightning.checkpoint.storage.local_copy import open_checkpoint
from det_lightning.checkpoint.storage.location import Location

__all__ = ["CheckpointContent", "load_checkpoint", "read_checkpoint"]

logger = logging.getLogger("det_lightning.checkpoint")


@dataclasses.dataclass
class CheckpointContent:
    """What :func:`read_checkpoint` found.

    Attributes:
        directory: where.
        state: content of ``state_dict.pth``, with the keys of the release that wrote it; see ``modernize``.
        trial_state: how far the trial had come.
        resume: content of ``resume.pth``; None if Determined wrote the checkpoint.
        epochs_known: ``trial_state`` tells the number of epochs; those of older releases do not.
        lightning: content of ``lightning.pth``; None unless a callback of Lightning's wrote the checkpoint.
        name: the checkpoint's id.
        source: path or URL of the file with the state, for messages.
        trial_class: the class that wrote it, as ``"module:QualName"``; None where nothing tells.
    """

    directory: pathlib.Path
    state: dict[str, Any]
    trial_state: TrialState
    resume: dict[str, Any] | None
    epochs_known: bool = True
    lightning: dict[str, Any] | None = None
    name: str = ""
    source: str = ""
    trial_class: str | None = None


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

    def read_if_there(name: str) -> dict[str, Any] | None:
        return read_state(directory / name, trusted=trusted) if (directory / name).is_file() else None

    state = read_state(state_file, trusted=trusted)
    warn_of_nan(state, str(state_file))
    resume = read_if_there(RESUME_FILE)
    if resume is not None:
        require_resume(resume, str(directory / RESUME_FILE))
    content = CheckpointContent(
        directory=directory,
        state=state,
        trial_state=trial_state,
        resume=resume,
        epochs_known=epochs_known,
        lightning=read_if_there(LIGHTNING_FILE),
        name=directory.name,
        source=str(state_file),
        trial_class=read_load_data(directory).trial_cls_spec,
    )
    # Last, for a file that was exchanged may be worse than damaged, and the readers tell.
    _compare_with_manifest(directory, trusted)
    return content


def _compare_with_manifest(directory: pathlib.Path, trusted: bool) -> None:
    if not trusted:
        require_unchanged(directory, FILES_READ)
    elif damage := find_damage(directory, FILES_READ):
        logger.warning("The trusted checkpoint %s is not as it was written: %s.", directory, "; ".join(damage))
