"""From a checkpoint to a trial with its weights."""

from __future__ import annotations

import json
import os
import pathlib
import warnings
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint import format as layout
from det_lightning.importing import import_from_path, load_class
from det_lightning.pytorch.context import PyTorchTrialContext
from det_lightning.pytorch.trial import PyTorchTrial
from det_lightning.pytorch.weights import load_models

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
    trusted: bool = False,
    **kwargs: Any,
) -> PyTorchTrial:
    """Build the trial of a checkpoint and load its weights.

    Args:
        path: the checkpoint's directory.
        trial_class: the trial's class; by default it is imported from the copy of the code in the checkpoint.
        trial_kwargs: arguments of the trial beyond the context.
        torch_load_kwargs: arguments of ``torch.load``; tensors go to the CPU by default.
        trusted: unpickle anything that the checkpoint holds, running whatever code it asks for.
        **kwargs: deprecated spelling of ``torch_load_kwargs``.

    Raises:
        CheckpointNotFound, IncompleteCheckpointError, UnsafeCheckpointError: see ``read_checkpoint``.
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
    directory = pathlib.Path(path)
    layout.require_complete(directory)
    load_data = layout.read_json(directory / layout.LOAD_DATA_FILE)
    hparams, exp_conf = _run_settings(directory, load_data, trusted)
    if trial_class is None:
        trial_class = _import_trial_class(directory, load_data["trial_cls_spec"])
    context = CheckpointLoadContext(hparams, exp_conf)
    trial = trial_class(context, **trial_kwargs or {})
    state = layout.read_state(directory / layout.STATE_FILE, trusted=trusted, **torch_load_kwargs or {})
    load_models(context.models, state, source=directory / layout.STATE_FILE)
    return trial


def _run_settings(
    directory: pathlib.Path, load_data: dict[str, Any], trusted: bool
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return hyperparameters and configuration; Determined writes neither where one of them is missing."""
    resume_file = directory / layout.RESUME_FILE
    if load_data["hparams"] is None and resume_file.exists():
        settings = json.loads(layout.read_state(resume_file, trusted=trusted)["settings"])
        return settings["hparams"], settings["experiment_config"]
    return load_data["hparams"], load_data["experiment_config"]


def _import_trial_class(directory: pathlib.Path, spec: str) -> type[PyTorchTrial]:
    code = directory / layout.CODE_DIR
    try:
        with import_from_path(code):
            trial_class = load_class(spec)
    except Exception as e:  # the import runs the trial's module, which may raise anything
        raise ValueError(
            f"The trial class {spec} can not be imported from {code}: {type(e).__name__}: {e}. Pass it as trial_class="
        ) from e
    if not (isinstance(trial_class, type) and issubclass(trial_class, PyTorchTrial)):
        raise errors.InvalidCheckpointException(
            f"{spec} in {code} is no det_lightning.pytorch.PyTorchTrial. If its code imports determined, call "
            "det_lightning.compat.install() first, or pass trial_class=."
        )
    return trial_class
