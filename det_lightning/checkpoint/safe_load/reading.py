"""Reading a whole checkpoint, and parts of a checkpoint: the weights, the resume state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.manifest import find_damage, require_inside, require_unchanged
from det_lightning.checkpoint.format.resume_state import ResumeState
from det_lightning.checkpoint.format.shards import (
    RESUME_ROOT,
    SHARDED_RESUME_VALUES,
    STATE_ROOT,
    index_files,
    part_files,
)
from det_lightning.checkpoint.safe_load.placeholders import read_weights
from det_lightning.checkpoint.safe_load.small_files import read_load_data, read_trial_state
from det_lightning.checkpoint.safe_load.state_file import read_known_state, read_state, warn_of_nan
from det_lightning.checkpoint.safe_load.stored_tensors import find_stored, read_all_parts, read_whole
from det_lightning.checkpoint.storage.location import Location, require_checkpoint_path
from det_lightning.checkpoint.storage.transfer import open_checkpoint
from det_lightning.escaping import get_logger

logger = get_logger(__name__)

#: Read a state file.
ReadFile = Callable[[pathlib.Path], dict[str, Any]]


def load_checkpoint(
    url: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    *,
    trusted: bool = False,
    in_parts: bool = False,
    verify_parts: bool = False,
    recorded: Collection[str] = (),
    only_weights: bool = False,
) -> CheckpointContent:
    """Read the checkpoint at a path or URL; see :func:`read_checkpoint`.

    Args:
        url: the checkpoint's own directory.
        options: see ``CheckpointStorage``.
        trusted: unpickle anything, and run any code that the files ask for.
        in_parts: see :func:`read_checkpoint`, as for ``verify_parts``, ``recorded`` and ``only_weights``; downloaded
            files are kept as long as the content.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        StorageError: the storage cannot be read.
        IncompleteCheckpointError, UnsafeCheckpointError: see :func:`read_checkpoint`.

    Example:
        >>> from det_lightning.checkpoint import CheckpointContent, CheckpointStorage
        >>> from det_lightning.checkpoint import TrialState, load_checkpoint
        >>> storage = CheckpointStorage("checkpoints")
        >>> built_by = {"trial_cls_spec": "model_def:MyTrial", "hparams": {}, "experiment_config": {}}
        >>> content = CheckpointContent({}, TrialState(batches_trained=100), load_data=built_by)
        >>> _ = storage.write(content)
        >>> load_checkpoint(storage.newest()).trial_state.batches_trained
        100
    """
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(open_checkpoint(url, options))
        content = read_checkpoint(
            directory,
            trusted=trusted,
            in_parts=in_parts,
            verify_parts=verify_parts,
            recorded=recorded,
            only_weights=only_weights,
        )
        # The files of both are read later.
        if content.is_sharded or (directory / layout.TENSORFLOW_FILE).is_file():
            content.kept = stack.pop_all()
    location = Location.parse(url, options)
    if not location.is_local:
        content.source = f"{location}/{pathlib.Path(content.source).relative_to(directory)}"
    return content


def read_checkpoint(
    directory: pathlib.Path,
    *,
    trusted: bool = False,
    in_parts: bool = False,
    verify_parts: bool = False,
    recorded: Collection[str] = (),
    only_weights: bool = False,
) -> CheckpointContent:
    """Read the checkpoint in ``directory``, of any release since 0.12.

    Args:
        directory: a checkpoint's own directory.
        trusted: unpickle anything, and run any code that the files ask for.
        in_parts: do not read the parts of a sharded checkpoint; return a ``StoredTensor`` for each sharded tensor.
        verify_parts: compare the parts of a sharded checkpoint with their checksums, after reading every part.
        recorded: SHA-256 of state files to trust, recorded by the caller when the files were written.
        only_weights: do not read objects outside of the weights and settings.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        IncompleteCheckpointError: the checkpoint is incomplete or damaged.
        UnsafeCheckpointError: the checkpoint refers to code and is not ``trusted``.

    Example:
        >>> from pathlib import Path
        >>> import det_lightning as det
        >>> from det_lightning.checkpoint import CheckpointStorage, read_checkpoint
        >>> from model_def import MyTrial
        >>> with det.pytorch.init(hparams={"lr": 0.01, "global_batch_size": 8}) as context:
        ...     det.pytorch.Trainer(MyTrial(context), context).fit(
        ...         max_length=det.pytorch.Batch(2), checkpoint_storage="checkpoints"
        ...     )
        >>> content = read_checkpoint(Path(CheckpointStorage("checkpoints").newest()))
        >>> content.trial_state.batches_trained
        2
    """
    if not isinstance(directory, os.PathLike):
        require_checkpoint_path(directory)
        directory = pathlib.Path(directory)  # callers without type checks pass text
    require_inside(directory)
    layout.require_complete(directory)
    state_file = layout.find_state_file(directory)
    read: ReadFile = functools.partial(read_weights if only_weights else read_state, trusted=trusted)
    if recorded:
        read = functools.partial(read_known_state, trusted=trusted, recorded=recorded)
    trial_state, epochs_known = read_trial_state(directory, trusted=trusted)
    state = read_state_file(state_file, read)
    warn_of_nan(state, str(state_file))
    lightning = directory / layout.LIGHTNING_FILE
    content = CheckpointContent(
        state=state,
        trial_state=trial_state,
        resume=read_resume(directory, read),
        lightning=read(lightning) if lightning.is_file() else None,
        load_data=read_load_data(directory),
        epochs_known=epochs_known,
        name=directory.name,
        source=str(state_file),
        directory=directory,
    )
    names: Sequence[str] = layout.FILES_READ
    if layout.is_sharded(directory, state_file):
        content = _find_parts(content, directory, trusted)
        content = content if in_parts else read_all_parts(content)
        names = [*names, *index_files(directory), *(part_files(directory) if verify_parts else [])]
    if (directory / layout.TENSORFLOW_FILE).is_file():
        names = [*names, *layout.find_files_of_tensorflow(directory)]
    # Last, because a replaced file may be unsafe, which the readers report.
    if not trusted:
        require_unchanged(directory, names)
    elif damage := find_damage(directory, names):
        differences = "; ".join(damage)
        logger.warning("The trusted checkpoint %s differs from its manifest: %s.", directory, differences)
    return content


def read_state_file(state_file: pathlib.Path, read: ReadFile) -> dict[str, Any]:
    """Return the state in a file of a checkpoint; TensorFlow's file of an Estimator stands for an empty state."""
    if state_file.name == layout.TENSORFLOW_FILE:
        return {"models_state_dict": [], "optimizers_state_dict": [], "lr_schedulers_state_dict": []}
    return read(state_file)


def _find_parts(content: CheckpointContent, directory: pathlib.Path, trusted: bool) -> CheckpointContent:
    resume = content.resume
    if resume is not None:
        found = {name: getattr(resume, name) for name in SHARDED_RESUME_VALUES}
        resume = dataclasses.replace(resume, **find_stored(directory, found, RESUME_ROOT, trusted=trusted))
    state = find_stored(directory, content.state, STATE_ROOT, trusted=trusted)
    return dataclasses.replace(content, state=state, resume=resume, is_sharded=True)


def read_models(
    directory: pathlib.Path, *, trusted: bool = False, **torch_load_kwargs: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return the state of a checkpoint with the weights of all models, and the paths of the files read.

    In a sharded checkpoint the other sharded tensors are not read, and nowhere are objects read beside the weights. For
    the arguments and exceptions, see :func:`read_state`.
    """
    state_file = layout.find_state_file(directory)
    if state_file.name == layout.TENSORFLOW_FILE:
        raise errors.InvalidCheckpointException(
            f"{directory} is a checkpoint of an EstimatorTrial, without weights of torch; train or evaluate "
            "that trial with det_lightning.estimator."
        )
    state = read_weights(state_file, trusted=trusted, **torch_load_kwargs)
    names = [state_file.relative_to(directory).as_posix()]
    if layout.is_sharded(directory, state_file):
        state = find_stored(directory, state, STATE_ROOT, trusted=trusted)
        state["models_state_dict"] = read_whole(state.get("models_state_dict"))
        names += index_files(directory)
    return state, names


def read_resume(directory: pathlib.Path, read: ReadFile) -> ResumeState | None:
    """Read the resume state of the checkpoint in ``directory``; return None if Determined wrote the checkpoint."""
    path = directory / layout.RESUME_FILE
    return ResumeState.from_dict(read(path), str(path)) if path.is_file() else None
