"""``load_trial_from_checkpoint_path``: builds a trial with the weights of a checkpoint."""

from __future__ import annotations

import functools
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from det_lightning import errors
from det_lightning.arguments import refuse_texts, require
from det_lightning.checkpoint import safe_load
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.layout import modernize, require_inside, require_unchanged, split_code
from det_lightning.checkpoint.format.resume_state import read_settings
from det_lightning.checkpoint.storage.checkpoint_storage import open_checkpoint
from det_lightning.compat import answering_determined
from det_lightning.escaping import escape, get_logger, name_some
from det_lightning.importing import import_only, load_class
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import (
    PyTorchTrial,
    adapt_legacy_trial,
    build_trial,
    is_legacy_trial,
    require_trial_class,
)
from det_lightning.pytorch._weights import load_models

logger = get_logger(__name__)


class CheckpointLoadContext(PyTorchTrialContext):
    """A context for building a trial that only holds weights, outside of training.

    Models stay on the device where the trial creates them. The trial reads ``hparams`` and ``exp_conf``.

    Example:
        >>> import det_lightning as det
        >>> from model_def import MyTrial
        >>> context = det.pytorch.CheckpointLoadContext(hparams={"lr": 0.1, "global_batch_size": 8})
        >>> MyTrial(context).head
        Linear(in_features=4, out_features=1, bias=True)
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
    """Build the trial of a checkpoint of any release since 0.12, and load the weights.

    Without ``trial_class=``, this runs the code of the checkpoint to import the trial's class. If you do not trust the
    code, give ``trial_class=``; then no code of the checkpoint runs.

    Code is compared with the checkpoint's manifest, if present, and unlisted files are not imported. Links are never
    followed.

    Args:
        path: path or URL of the checkpoint's directory.
        trial_class: the trial's class. Defaults to the class in the checkpoint's copy of the code, imported with
            det_lightning as ``determined``.
        trial_kwargs: arguments of the trial in addition to the context.
        torch_load_kwargs: arguments of ``torch.load``; tensors go to the CPU by default.
        hparams: hyperparameters for the trial. Defaults to the hyperparameters in the checkpoint.
        exp_conf: experiment configuration for the trial. Defaults to the configuration in the checkpoint.
        storage_options: options for the file system if ``path`` is a URL; see ``CheckpointStorage``.
        trusted: unpickle anything in the checkpoint, running whatever code the checkpoint contains.
        **kwargs: deprecated spelling of ``torch_load_kwargs``.

    Returns:
        The trial. For a checkpoint without ``load_data.json`` and a trial with the interface before 0.12.13, the
        model, as in Determined.

    Raises:
        CheckpointNotFound, IncompleteCheckpointError, UnsafeCheckpointError: see ``read_checkpoint``;
            ``IncompleteCheckpointError`` also if the code to import was changed.
        StorageError: a URL cannot be read.
        ValueError: the trial's class cannot be imported from the checkpoint, or both spellings are used.
        InvalidCheckpointException: the weights do not fit the trial's models.

    Example:
        >>> import det_lightning as det
        >>> from det_lightning.checkpoint import CheckpointStorage
        >>> from model_def import MyTrial
        >>> with det.pytorch.init(hparams={"lr": 0.01, "global_batch_size": 8}) as context:
        ...     trainer = det.pytorch.Trainer(MyTrial(context), context)
        ...     trainer.fit(max_length=det.pytorch.Batch(2), checkpoint_storage="checkpoints")
        >>> newest = CheckpointStorage("checkpoints").newest()
        >>> det.pytorch.load_trial_from_checkpoint_path(newest, trial_class=MyTrial).head
        Linear(in_features=4, out_features=1, bias=True)
    """
    if trial_class is not None:
        require_trial_class("load_trial_from_checkpoint_path(trial_class=...)", trial_class)
    refuse_texts("load_trial_from_checkpoint_path()", trusted=trusted)
    for name, given in {"torch_load_kwargs": torch_load_kwargs, "hparams": hparams, "exp_conf": exp_conf}.items():
        require(given is None or isinstance(given, Mapping), f"{name}=", "a dict", given)
    if kwargs:
        if torch_load_kwargs:
            raise ValueError(f"Pass torch_load_kwargs or further arguments, not both; got {sorted(kwargs)} as well.")
        warnings.warn(
            f"Pass {sorted(kwargs)} in torch_load_kwargs, not as arguments of load_trial_from_checkpoint_path().",
            FutureWarning,
            stacklevel=2,
        )
        torch_load_kwargs = kwargs
    with open_checkpoint(path, storage_options, with_code=trial_class is None) as directory:
        require_inside(directory)
        layout.require_complete(directory)
        state_file = layout.find_state_file(directory)
        may_be_functional = not (directory / layout.LOAD_DATA_FILE).is_file()
        load_data = safe_load.read_load_data(directory)
        # Determined writes neither if one of them is missing.
        resume = None
        if load_data["hparams"] is None:
            resume = safe_load.read_resume(directory, functools.partial(safe_load.read_weights, trusted=trusted))
        settings = read_settings(resume, load_data)
        hparams = settings["hparams"] if hparams is None else hparams
        exp_conf = settings["experiment_config"] if exp_conf is None else exp_conf
        state, files_read = safe_load.read_models(directory, trusted=trusted, **torch_load_kwargs or {})
        if not trusted:
            require_unchanged(directory, [*files_read, layout.LOAD_DATA_FILE])
        modernize(state, str(state_file))
        with answering_determined():
            chosen = trial_class or _import_trial_class(directory, load_data, trusted)
            context = CheckpointLoadContext(hparams, exp_conf)
            trial = build_trial(chosen, context, trial_kwargs)
        adapt_legacy_trial(trial, context)
        load_models(context, state, str(state_file), load_data["trial_cls_spec"])
    if may_be_functional and is_legacy_trial(trial):
        return context.models[0]
    return trial


def _import_trial_class(directory: pathlib.Path, load_data: dict[str, Any], trusted: bool) -> type[PyTorchTrial]:
    code = directory / layout.CODE_DIR
    spec = load_data["trial_cls_spec"]
    if spec is None:
        raise ValueError(
            f"{directory} does not name the trial's class: up to 0.17.7, only downloads from Determined's platform had "
            "the name. Pass trial_class=, and hparams= if the trial has hyperparameters."
        )
    files, others = split_code(directory, trusted=trusted)
    unused = name_some([ascii(name) for name in others])
    if unused:
        logger.warning(
            "Not imported from the checkpoint %s, because they are links or %s does not list them: %s.",
            *(directory, layout.METADATA_FILE, unused),
        )
    try:
        with import_only(code, [directory / name for name in files]):
            trial_class = load_class(spec)
    except Exception as e:  # the import runs the trial's module, which may raise anything
        beside = f" Not looked at, as links or not listed in {layout.METADATA_FILE}: {unused}." if unused else ""
        said = "\n".join(map(escape, str(e).splitlines()))
        raise ValueError(
            f"The trial class {escape(spec):.200} cannot be imported from {escape(code)}: {type(e).__name__}: "
            f"{said}.{beside} Pass trial_class=."
        ) from e
    if not (isinstance(trial_class, type) and issubclass(trial_class, PyTorchTrial)):
        raise errors.InvalidCheckpointException(
            f"{spec!s:.200} in {code} must be a det_lightning.pytorch.PyTorchTrial; got "
            f"{trial_class!r:.200}. Pass trial_class=."
        )
    return trial_class
