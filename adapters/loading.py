"""``SavedTrial``: a trial in a ``.ckpt`` file or directory, for ``TrialModule.load_from_checkpoint``."""

from __future__ import annotations

import inspect
import os
import re
from collections import OrderedDict
from collections.abc import Container, Mapping
from typing import IO, Any

import torch

from det_lightning import errors
from det_lightning.adapters.lightning_checkpoint import DETERMINED_KEY, TrialCheckpointIO
from det_lightning.adapters.lightning_package import pl
from det_lightning.checkpoint import safe_load
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import modernize
from det_lightning.checkpoint.format.lightning_file import TRIAL_KEY, from_lightning
from det_lightning.checkpoint.format.resume_state import read_settings
from det_lightning.checkpoint.storage.location import Location
from det_lightning.distributed.backend import DDP_PREFIX
from det_lightning.masking import is_masked, leave_out_masked
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._weights import load_models

# A model of the trial in the state dict of a module.
_MODEL = re.compile(r"models\.\d+")


class SavedTrial:
    """A trial in a checkpoint: a ``.ckpt`` file or a directory in Determined's format.

    The arguments and the errors are those of ``TrialModule.load_from_checkpoint``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | IO[Any],
        map_location: Any = None,
        weights_only: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._map_location = map_location
        where: Any = map_location if map_location is not None else _keep_device
        if isinstance(path, str | os.PathLike):
            self._source = str(Location.parse(path, dict(storage_options or {})))
            reader = TrialCheckpointIO(
                pl.plugins.TorchCheckpointIO(), trusted=not weights_only, options=storage_options, only_weights=True
            )
            checkpoint = reader.load_checkpoint(path, where, weights_only)
        else:
            self._source = "the open file"
            checkpoint = safe_load.read_weights(path, trusted=not weights_only, name=self._source, map_location=where)
        if DETERMINED_KEY not in checkpoint and TRIAL_KEY not in checkpoint:
            raise errors.InvalidCheckpointException(
                f"{self._source} was not written by a TrialModule. `det-lightning checkpoint import --any-module` "
                "converts a checkpoint of another LightningModule."
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
            hparams = leave_out_masked(hparams, "hparams", lambda *_: True)
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
        own = [name for name in parameters if name in kept and name not in inspect.signature(base).parameters]
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
    """Leave a tensor on the device where it was saved, or move the tensor to the CPU if the device is missing."""
    kind = location.partition(":")[0]
    module = getattr(torch, kind, None)
    is_there = kind == "cpu" or (module is not None and module.is_available())
    return None if is_there else storage.cpu()  # type: ignore[no-untyped-call]
