"""From a checkpoint to a trial with its weights."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint import layout
from det_lightning.checkpoint.legacy import LoadData, modernize, read_load_data
from det_lightning.checkpoint.manifest import require_unchanged
from det_lightning.checkpoint.opening import open_checkpoint
from det_lightning.checkpoint.tensors import read_state
from det_lightning.compat import answering_determined
from det_lightning.importing import import_from_path, load_class
from det_lightning.pytorch._legacy_trial import adapt_legacy_trial, is_legacy_trial
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial
from det_lightning.pytorch._weights import load_models

__all__ = ["CheckpointLoadContext", "load_trial_from_checkpoint_path"]


class CheckpointLoadContext(PyTorchTrialContext):
    """A context for building a trial to hold weights, outside of training.

    Models are left on the device on which the trial makes them.

    Args:
        hparams: hyperparameters that the trial asks for.
        exp_conf: experiment configuration that the trial asks for.
    """

    def __init__(self, hparams: dict[str, Any] | None = None, exp_conf: dict[str, Any] | None = None) -> None:
        super().__init__(hparams=hparams, exp_conf=exp_conf, trial_seed=0, loading_only=True)


def load_trial_from_checkpoint_path(
    path: str | os.PathLike[str],
    trial_class: type[PyTorchTrial] | None = None,
    trial_kwargs: dict[str, Any] | None = None,
    torch_load_kwargs: dict[str, Any] | None = None,
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trusted: bool = False,
    **kwargs: Any,
) -> Any:
    """Build the trial of a checkpoint of any release since 0.12 and load its weights.

    Args:
        path: path or URL of the checkpoint's directory.
        trial_class: the trial's class; by default it is imported from the copy of the code in the checkpoint, with
            ``import determined`` answered by det_lightning.
        trial_kwargs: arguments of the trial beyond the context.
        torch_load_kwargs: arguments of ``torch.load``; tensors go to the CPU by default.
        hparams: hyperparameters for the trial; by default those in the checkpoint.
        exp_conf: experiment configuration for the trial; by default the one in the checkpoint.
        storage_options: what the file system needs to know where ``path`` is a URL; see ``CheckpointStorage``.
        trusted: unpickle anything that the checkpoint holds, running whatever code it asks for.
        **kwargs: deprecated spelling of ``torch_load_kwargs``.

    Returns:
        The trial; for a trial of the interface before 0.12.13, whose checkpoint has no ``load_data.json``, its model,
        as in Determined.

    Raises:
        CheckpointNotFound, IncompleteCheckpointError, UnsafeCheckpointError: see ``read_checkpoint``.
        StorageError: a URL can not be read.
        ValueError: the trial's class can not be imported from the checkpoint, or both spellings are used.
        InvalidCheckpointException: the weights do not fit the trial's models.
    """
    if kwargs:
        if torch_load_kwargs:
            raise ValueError(f"Give torch_load_kwargs or further arguments, not both; got {sorted(kwargs)} as well.")
        warnings.warn(
            f"Pass {sorted(kwargs)} in torch_load_kwargs, not as arguments of load_trial_from_checkpoint_path().",
            FutureWarning,
            stacklevel=2,
        )
        torch_load_kwargs = kwargs
    with open_checkpoint(path, storage_options, with_code=trial_class is None) as directory:
        layout.require_complete(directory)
        state_file = layout.find_state_file(directory)
        load_data = _with_settings(read_load_data(directory), directory, hparams, exp_conf, trusted)
        state = read_state(state_file, trusted=trusted, **torch_load_kwargs or {})
        if not trusted:
            require_unchanged(directory, [state_file.relative_to(directory).as_posix(), layout.LOAD_DATA_FILE])
        modernize(state, str(state_file))
        with answering_determined():
            chosen = trial_class or _import_trial_class(directory, load_data)
            context = CheckpointLoadContext(load_data.hparams, load_data.experiment_config)
            trial = chosen(context, **trial_kwargs or {})
        adapt_legacy_trial(trial, context)
        load_models(context, state, str(state_file), load_data.trial_cls_spec)
    if load_data.may_be_functional and is_legacy_trial(trial):
        return context.models[0]
    return trial


def _with_settings(
    load_data: LoadData,
    directory: pathlib.Path,
    hparams: dict[str, Any] | None,
    exp_conf: dict[str, Any] | None,
    trusted: bool,
) -> LoadData:
    """Fill in hyperparameters and configuration: as given, as in the checkpoint, or as in our own part of it.

    Determined writes neither where one of them is missing.
    """
    resume_file = directory / layout.RESUME_FILE
    saved = {"hparams": load_data.hparams, "experiment_config": load_data.experiment_config}
    if load_data.hparams is None and resume_file.exists():
        saved.update(json.loads(read_state(resume_file, trusted=trusted)["settings"]))
    return dataclasses.replace(
        load_data,
        hparams=saved["hparams"] if hparams is None else hparams,
        experiment_config=saved["experiment_config"] if exp_conf is None else exp_conf,
    )


def _import_trial_class(directory: pathlib.Path, load_data: LoadData) -> type[PyTorchTrial]:
    code, spec = directory / layout.CODE_DIR, load_data.trial_cls_spec
    if spec is None:
        raise ValueError(
            f"{directory} does not tell the trial's class: up to 0.17.7 only Determined's platform knew it, and added "
            "it to what it downloaded. Pass trial_class=, and hparams= if the trial asks for any."
        )
    try:
        with import_from_path(code):
            trial_class = load_class(spec)
    except Exception as e:  # the import runs the trial's module, which may raise anything
        raise ValueError(
            f"The trial class {spec} can not be imported from {code}: {type(e).__name__}: {e}. Pass it as trial_class="
        ) from e
    if not (isinstance(trial_class, type) and issubclass(trial_class, PyTorchTrial)):
        raise errors.InvalidCheckpointException(
            f"{spec} in {code} is no det_lightning.pytorch.PyTorchTrial but {trial_class!r}. Pass trial_class=."
        )
    return trial_class
