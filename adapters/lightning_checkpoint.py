"""Makes Lightning read and write Determined's format: ``ckpt_path=``, ``ModelCheckpoint``, ``load_from_checkpoint``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import pathlib
import re
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from typing import IO, Any

import torch

from det_lightning import errors
from det_lightning.adapters import flags
from det_lightning.adapters.lightning_internals import get_hint_logger
from det_lightning.adapters.lightning_package import TrainerFn, lightning_version, pl
from det_lightning.checkpoint import safe_load
from det_lightning.checkpoint.format.code_copy import CodeCopier, require_code_directory
from det_lightning.checkpoint.format.content import CheckpointContent, CheckpointReading
from det_lightning.checkpoint.format.layout import modernize
from det_lightning.checkpoint.format.lightning_file import (
    TRIAL_KEY,
    from_entry,
    from_lightning,
    join_models,
    split_models,
    to_entry,
)
from det_lightning.checkpoint.format.resume_state import read_settings
from det_lightning.checkpoint.format.standard_values import with_calls, with_plain_numbers
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import Location, download, explain_errors, new_id
from det_lightning.checkpoint.unsafe_values import UnsafeValues, list_lightning_parts, list_parts
from det_lightning.distributed.backend import DDP_PREFIX
from det_lightning.engine.checkpointing import RunContent
from det_lightning.engine.run import TrialRun, require_resumable
from det_lightning.masking import is_masked, mask_text
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._weights import load_models

#: The key of a loaded Determined checkpoint in Lightning's dict.
DETERMINED_KEY = "determined_checkpoint"
# Entries of Lightning's checkpoints with possible numpy numbers, for example a learning rate.
_WITH_USERS_NUMBERS = {"optimizer_states", "lr_schedulers", "hyper_parameters"}


def _mask_record(record: logging.LogRecord) -> bool:
    record.msg = mask_text(record.getMessage())
    record.args = ()
    return True


def add_content(checkpoint: dict[str, Any], run: TrialRun | None) -> None:
    """Add the trial's callbacks, random state and position in the data to a Lightning checkpoint.

    A file of ``OnExceptionCheckpoint`` may be written before there is a run.
    """
    for entry in _WITH_USERS_NUMBERS & checkpoint.keys():
        checkpoint[entry] = with_plain_numbers(checkpoint[entry])
    checkpoint[TRIAL_KEY] = None if run is None else to_entry(RunContent(run).collect_without_weights())


def take_content(
    checkpoint: dict[str, Any], module: pl.LightningModule, context: PyTorchTrialContext
) -> CheckpointContent | None:
    """Return the content to resume from, or None if the checkpoint has no trial.

    Load the trial's weights, unless they are in Determined's format and a fit begins: the trial's callbacks may change
    those first. Lightning then loads the rest of the module, and no state of loops: the trial has a position of its
    own.
    """
    content: CheckpointContent | None = checkpoint.get(DETERMINED_KEY)
    trainer = module.trainer
    fitting = trainer.state.fn is TrainerFn.FITTING
    if content is not None:
        require_resumable(content)
        if not fitting:
            content = safe_load.read_all_parts(content) if content.is_sharded else content
            modernize(content.state, content.source)
            load_models(context, content.state, content.source, content.trial_class)
        rest = (content.lightning or {}).get("state_dict", {})
        if fitting and "current_model_state" in checkpoint and _averages_weights(trainer):
            # The callback expects its averages in the place of the weights.
            rest = {**join_models(content.state["models_state_dict"]), **rest}
            content.state["models_state_dict"], _ = split_models(checkpoint["current_model_state"])
    elif checkpoint.get(TRIAL_KEY) is not None:
        content = from_entry(checkpoint[TRIAL_KEY])
        require_resumable(content)
        # Names may have a prefix from distributed training, unknown to Lightning.
        models, rest = split_models(checkpoint["state_dict"])
        load_models(context, {"models_state_dict": models}, content.source)
    else:  # no trial, or no run of the trial had begun
        rest = checkpoint["state_dict"]
    checkpoint.pop("loops", None)
    if content is not None and fitting and not checkpoint.get("callbacks"):
        flags.warn_of_lost_callbacks(trainer)
    if content is not None or TRIAL_KEY in checkpoint:
        checkpoint["state_dict"] = {**module.state_dict(), **rest}
    return content


def _averages_weights(trainer: Any) -> bool:
    kind = getattr(pl.callbacks, "WeightAveraging", ())  # new in Lightning 2.6
    return any(isinstance(callback, kind) for callback in trainer.callbacks)


def _uses_files_of_torch(plugin: pl.plugins.CheckpointIO | None) -> bool:
    if isinstance(plugin, pl.plugins.AsyncCheckpointIO):
        plugin = plugin.checkpoint_io
    return type(plugin) is pl.plugins.TorchCheckpointIO


def _read_file(location: Location, read: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Read a file that Lightning wrote. Before Lightning 2.6 its own reader runs any code in a file."""
    if location.is_local:
        if not location.exists():
            raise errors.CheckpointNotFound(f"There is no checkpoint {location}.")
        return read(location.local_path)
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as folder:
        download(location.parent, [location.name], pathlib.Path(folder))
        copied = pathlib.Path(folder) / location.name
        return read(copied, name=location)


class TrialCheckpointIO(pl.plugins.CheckpointIO):
    """Reads directories in Determined's format for ``ckpt_path=``; reads and writes files through ``inner``."""

    def __init__(
        self,
        inner: pl.plugins.CheckpointIO,
        reading: CheckpointReading,
        only_weights: bool = False,
    ) -> None:
        self.inner = inner
        self.reading = reading
        # Lightning logs the URL of the checkpoint.
        get_hint_logger().addFilter(_mask_record)
        self._only_weights = only_weights

    @functools.cached_property
    def unsafe_values(self) -> UnsafeValues:
        """Warns of values that a resume could not read safely."""
        return UnsafeValues()

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file or directory at a path or URL; raise a CheckpointError. ``weights_only=False`` means trusted."""
        location = Location.parse(path, self.reading.storage_options)
        with explain_errors(f"looking for {location}"):
            # One of the newest that has just been deleted counts as damaged.
            is_directory = location.is_dir() or str(path) in self.reading.newest_first
            is_missing = not (location.is_local or is_directory or location.exists())
        if is_missing:  # Lightning would log the whole URL
            raise errors.CheckpointNotFound(f"There is no checkpoint {location}.")
        reading = dataclasses.replace(self.reading, trusted=True) if weights_only is False else self.reading
        if not is_directory:
            if _uses_files_of_torch(self.inner):
                read = safe_load.read_weights if self._only_weights else safe_load.read_state
                where = map_location or "cpu"
                return _read_file(location, functools.partial(read, map_location=where, trusted=reading.trusted))
            options = {} if weights_only is None else {"weights_only": weights_only}
            # Lightning does not allow numpy's random state in a TrialModule's entry.
            with safe_load.allow_safe_values():
                return dict(safe_load.finish(self.inner.load_checkpoint(path, map_location, **options)))
        content = safe_load.load_newest(str(path), reading, only_weights=self._only_weights)
        return {
            "callbacks": {},
            **(content.lightning or {}),  # also entries by on_save_checkpoint
            "pytorch-lightning_version": lightning_version,
            "epoch": content.trial_state.epochs_trained,
            "global_step": content.trial_state.batches_trained,
            "state_dict": {},
            "optimizer_states": [],
            "lr_schedulers": [],
            DETERMINED_KEY: content,
        }

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file through ``inner``, with a warning if no resume could read a value."""
        self.unsafe_values.warn_of(list_lightning_parts(checkpoint))
        if _uses_files_of_torch(self.inner):
            checkpoint = with_calls(checkpoint)
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a file."""
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        """End what ``inner`` has begun."""
        self.inner.teardown()


class DeterminedCheckpointIO(TrialCheckpointIO):
    """Makes Lightning write directories in Determined's format in place of files.

    With ``pl.Trainer(plugins=[DeterminedCheckpointIO()])`` a ``ModelCheckpoint`` still decides when to save, under
    which name, and how many checkpoints to keep. Determined and ``ckpt_path=`` load the checkpoints. The directory also
    holds Lightning's state beyond the trial, for example of callbacks.

    Args:
        code_dir, code_with_secrets: the code to copy; see ``DeterminedCheckpoint``.
        trusted: unpickle any object, running any code in a checkpoint.
        options: for the file system of a URL; see ``CheckpointStorage``.

    Example:
        >>> from pytorch_lightning.callbacks import ModelCheckpoint
        >>> from det_lightning.adapters import DeterminedCheckpointIO
        >>> best = ModelCheckpoint("best", monitor="validation_loss")
        >>> plugin = DeterminedCheckpointIO()

        Pass them in ``pl.Trainer(callbacks=[best], plugins=[plugin])``.
    """

    def __init__(
        self,
        code_dir: str | os.PathLike[str] | None = None,
        *,
        code_with_secrets: bool = False,
        trusted: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(pl.plugins.TorchCheckpointIO(), CheckpointReading(trusted, options or {}))
        require_code_directory("DeterminedCheckpointIO", code_dir)
        self._code = CodeCopier(code_dir, code_with_secrets)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a directory at ``path``, replacing one that is there.

        Raises:
            InvalidCheckpointException: the checkpoint is not from a ``TrialModule``.
            CheckpointError: writing fails.
        """
        storage, name = self._open_storage(path)
        files = from_lightning(checkpoint)
        self.unsafe_values.warn_of(list_parts(files))
        target = storage.root.checkpoint(name)
        if target.is_dir() or (target.is_local and not target.exists()):
            # Only a complete directory gets the name.
            storage.replace(name, by=storage.write(files, f"{name}-{new_id()}", self._code))
        else:
            storage.write(files, name, self._code)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a directory, a link or a file."""
        storage, name = self._open_storage(path)
        location = storage.root.checkpoint(name)
        if location.is_local and location.link_target() is not None:
            location.local_path.unlink()
        elif location.is_dir():
            storage.delete(name)
        else:
            super().remove_checkpoint(path)

    def _open_storage(self, path: Any) -> tuple[CheckpointStorage, str]:
        parent, _, name = str(path).rstrip("/").rpartition("/")
        return CheckpointStorage(parent or ".", options=self.reading.storage_options), name


# A model of the trial in the state dict of a module.
_MODEL = re.compile(r"models\.\d+")


class SavedTrial:
    """A trial in a checkpoint: a ``.ckpt`` file or a directory in Determined's format.

    The errors are those of ``TrialModule.load_from_checkpoint``.
    """

    def __init__(
        self, path: str | os.PathLike[str] | IO[Any], reading: CheckpointReading, map_location: Any = None
    ) -> None:
        self._map_location = map_location
        where: Any = map_location if map_location is not None else _keep_device
        if isinstance(path, str | os.PathLike):
            self._source = str(Location.parse(path, reading.storage_options))
            reader = TrialCheckpointIO(pl.plugins.TorchCheckpointIO(), reading, only_weights=True)
            checkpoint = reader.load_checkpoint(path, where)
        else:
            self._source = "the open file"
            checkpoint = safe_load.read_weights(path, trusted=reading.trusted, name=self._source, map_location=where)
        if DETERMINED_KEY not in checkpoint and TRIAL_KEY not in checkpoint:
            raise errors.InvalidCheckpointException(
                f"{self._source} was not written by a TrialModule; load it with the LightningModule that wrote it."
            )
        self._content: CheckpointContent = checkpoint.get(DETERMINED_KEY) or from_lightning(checkpoint)
        modernize(self._content.state, self._source)

    def arguments(self, module_class: type, given: dict[str, Any], hparams_file: Any = None) -> dict[str, Any]:
        """Return the arguments of a module: the given arguments, and the settings in the checkpoint."""
        parameters = inspect.signature(module_class).parameters
        if "trial" in parameters and parameters["trial"].default is inspect.Parameter.empty and "trial" not in given:
            written_by = self._content.trial_class
            raise TypeError(
                f"{module_class.__name__}.load_from_checkpoint(path, trial=...) needs the class of the trial"
                + (f"; {self._source} was written by {written_by}." if written_by else ".")
            )
        content = self._content
        settings = read_settings(content.resume, content.load_data)
        hparams = settings["hparams"]
        if hparams_file is not None:
            hparams = dict(pl.core.saving.load_hparams_from_yaml(hparams_file))
        elif hparams is None:  # as in a `det-lightning checkpoint export` of an older checkpoint
            hparams = (content.lightning or {}).get("hyper_parameters")
        has_context = given.get("context") is not None  # which has the settings
        known = {} if has_context else {"hparams": hparams, "exp_conf": settings["experiment_config"]}
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        taken = {
            name: value for name, value in known.items() if value is not None and (takes_any or name in parameters)
        }
        kept = self._read_kept_arguments() if hparams_file is None else hparams
        if unread := [
            name for name, value in taken.items() if name not in given and safe_load.holds_placeholder(value)
        ]:
            raise errors.UnsafeCheckpointError(
                f"{' and '.join(unread)} in {self._source} hold objects, and reading these could run code. Pass "
                f"{'=..., '.join(unread)}=...; or, if you know where the file comes from, weights_only=False."
            )
        # Only arguments added by a subclass: no file may declare itself trusted.
        base = next(one for one in module_class.__mro__ if one.__module__.startswith("det_lightning."))
        known_names = {*inspect.signature(base).parameters, *inspect.signature(CheckpointReading).parameters}
        own = [name for name in parameters if name in kept and name not in known_names]
        usable = [name for name in own if not (is_masked(kept[name]) or safe_load.holds_placeholder(kept[name]))]
        return {**{name: kept[name] for name in usable}, **taken, **given}

    def _read_kept_arguments(self) -> dict[str, Any]:
        """Return the arguments of a subclass kept by ``save_hyperparameters()``."""
        lightning = self._content.lightning or {}
        # Otherwise TrialModule itself has kept the hyperparameters of the trial.
        has_arguments = lightning.get("hparams_name") == "kwargs"
        return dict(lightning.get("hyper_parameters") or {}) if has_arguments else {}

    def device(self) -> torch.device:
        """Return the device to load to: ``map_location``, or the device of the saved weights."""
        if isinstance(self._map_location, str | torch.device):
            return torch.device(self._map_location)
        models = self._content.state["models_state_dict"]
        tensors = (value for model in models for value in model.values() if isinstance(value, torch.Tensor))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def load_into(self, context: PyTorchTrialContext, strict: bool = True) -> None:
        """Load the weights into the models of a context."""
        content = self._content
        load_models(context, content.state, self._source, content.trial_class, strict=strict)

    def get_rest_of_module(self) -> dict[str, Any]:
        """Return the weights of the module outside of the trial's models."""
        return dict((self._content.lightning or {}).get("state_dict", {}))


def rename_models(weights: Mapping[str, Any], expected: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the state dict of a module with the names in ``expected``: DDP adds a prefix to names."""
    renamed = OrderedDict((_match_name(expected, name), value) for name, value in weights.items())
    versions = getattr(weights, "_metadata", {})  # versions of modules, attached by torch to a state dict
    known = getattr(expected, "_metadata", {})
    renamed._metadata = OrderedDict(  # type: ignore[attr-defined]
        (_match_name(known, name), version) for name, version in versions.items()
    )
    return renamed


def _match_name(known: Container[str], name: str) -> str:
    match = _MODEL.match(name)
    if name in known or match is None:
        return name
    model = match[0]
    rest = name[match.end() :]
    wrapped = f".{DDP_PREFIX}".removesuffix(".")
    return next((one for one in (model + wrapped + rest, model + rest.removeprefix(wrapped)) if one in known), name)


def _keep_device(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """Leave a tensor on the device where it was saved, or move it to the CPU if that device is missing."""
    kind = location.partition(":")[0]
    module = getattr(torch, kind, None)
    is_there = kind == "cpu" or (module is not None and module.is_available())
    return None if is_there else storage.cpu()  # type: ignore[no-untyped-call]
