"""Determined's checkpoints in the places where Lightning reads and writes checkpoints."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import pathlib
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from det_lightning import errors
from det_lightning.adapters.lightning_internals import get_hint_logger
from det_lightning.adapters.lightning_package import lightning_version, pl
from det_lightning.checkpoint import safe_load
from det_lightning.checkpoint.format.code_copy import CodeCopier, require_code_directory
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import modernize
from det_lightning.checkpoint.format.lightning_file import (
    TRIAL_KEY,
    from_entry,
    from_lightning,
    join_models,
    split_models,
    to_entry,
)
from det_lightning.checkpoint.format.manifest import find_damage
from det_lightning.checkpoint.format.standard_values import with_calls, with_plain_numbers
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import Location, explain_errors, new_id
from det_lightning.checkpoint.storage.transfer import RetryPolicy, download, open_checkpoint
from det_lightning.checkpoint.unreadable import UnreadableValues, list_lightning_parts, list_parts
from det_lightning.engine.resume import require_resumable
from det_lightning.engine.run import TrialRun
from det_lightning.engine.run_content import RunContent
from det_lightning.escaping import get_logger
from det_lightning.masking import mask_text, mask_url
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._weights import load_models

logger = get_logger(__name__)

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
    checkpoint: dict[str, Any], module: pl.LightningModule, context: PyTorchTrialContext, fitting: bool
) -> CheckpointContent | None:
    """Return the content to resume from, or None if the checkpoint has no trial.

    Load the trial's weights, except weights in Determined's format during a fit: the trial's callbacks may change these
    first. Lightning then loads the rest of the module, and no state of loops: the trial has a position of its own.
    """
    content: CheckpointContent | None = checkpoint.get(DETERMINED_KEY)
    if content is not None:
        require_resumable(content)
        if not fitting:
            content = safe_load.read_all_parts(content) if content.is_sharded else content
            modernize(content.state, content.source)
            load_models(context, content.state, content.source, content.trial_class)
        rest = (content.lightning or {}).get("state_dict", {})
        if fitting and "current_model_state" in checkpoint and _averages_weights(module.trainer):
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
    if content is not None or TRIAL_KEY in checkpoint:
        checkpoint["state_dict"] = {**module.state_dict(), **rest}
    checkpoint.pop("loops", None)
    return content


def _averages_weights(trainer: Any) -> bool:
    kind = getattr(pl.callbacks, "WeightAveraging", ())  # new in Lightning 2.6
    return any(isinstance(callback, kind) for callback in trainer.callbacks)


def _uses_files_of_torch(plugin: pl.plugins.CheckpointIO | None) -> bool:
    if isinstance(plugin, pl.plugins.AsyncCheckpointIO):
        plugin = plugin.checkpoint_io
    return type(plugin) is pl.plugins.TorchCheckpointIO


def _read_file(location: Location, read: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Read a file that Lightning wrote. Lightning's own reader runs any code in a file, before Lightning 2.6."""
    if location.is_local:
        if not location.exists():
            raise errors.CheckpointNotFound(f"There is no checkpoint {location}.")
        return read(location.local_path)
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as folder:
        download(location.parent, [location.name], pathlib.Path(folder), RetryPolicy())
        copied = pathlib.Path(folder) / location.name
        return read(copied, name=location)


class TrialCheckpointIO(pl.plugins.CheckpointIO):
    """Reads directories in Determined's format for ``ckpt_path=``; reads and writes files through ``inner``."""

    def __init__(
        self,
        inner: pl.plugins.CheckpointIO,
        trusted: bool = False,
        options: Mapping[str, Any] | None = None,
        newest_first: Sequence[str] = (),
        recorded: Collection[str] = (),
        only_weights: bool = False,
    ) -> None:
        self.inner = inner
        # Lightning logs the URL of the checkpoint.
        get_hint_logger().addFilter(_mask_record)
        self.trusted = trusted
        self.options = dict(options or {})
        self._newest_first = list(newest_first)
        self._recorded = frozenset(recorded)
        self._only_weights = only_weights

    @functools.cached_property
    def unreadable(self) -> UnreadableValues:
        """Warns of values that no resume could read safely."""
        return UnreadableValues()

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file or directory at a path or URL; raise a CheckpointError. ``weights_only=False`` means trusted."""
        location = Location.parse(path, self.options)
        with explain_errors(f"looking for {location}"):
            is_directory = location.is_dir()
            is_missing = not (location.is_local or is_directory or location.exists())
        if is_missing:  # Lightning would log the whole URL
            raise errors.CheckpointNotFound(f"There is no checkpoint {location}.")
        trusted = self.trusted or weights_only is False
        if not is_directory:
            if _uses_files_of_torch(self.inner):
                read = safe_load.read_weights if self._only_weights else safe_load.read_state
                return _read_file(
                    location, functools.partial(read, map_location=map_location or "cpu", trusted=trusted)
                )
            options = {} if weights_only is None else {"weights_only": weights_only}
            # Lightning does not allow numpy's random state in a TrialModule's entry.
            with safe_load.allow_safe_values():
                return dict(safe_load.finish(self.inner.load_checkpoint(path, map_location, **options)))
        content = self._load(str(path), trusted=trusted)
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

    def _load(self, path: str, trusted: bool) -> CheckpointContent:
        """Read a checkpoint, or the checkpoint before a damaged one; raise the first error if none can be read."""
        position = self._newest_first.index(path) if path in self._newest_first else len(self._newest_first)
        failures: list[errors.CheckpointError] = []
        for candidate, before in itertools.pairwise([path, *self._newest_first[position + 1 :], None]):
            assert candidate is not None
            try:
                # Before another checkpoint, damage must show before parts of a sharded checkpoint are loaded.
                return safe_load.load_checkpoint(
                    candidate,
                    self.options,
                    trusted=trusted,
                    in_parts=True,
                    verify_parts=before is not None,
                    recorded=self._recorded,
                    only_weights=self._only_weights,
                )
            except errors.CheckpointError as e:
                failures.append(e)
                if before is None or not self._is_damaged(candidate, e):
                    break
                logger.warning(
                    "Checkpoint %s is damaged: %s The run resumes from the checkpoint before, %s.",
                    *(mask_url(path), e, mask_url(before)),
                )
        raise failures[0]

    def _is_damaged(self, path: str, error: errors.CheckpointError) -> bool:
        if isinstance(error, errors.UnsafeCheckpointError):
            # Flipped bits may look like a reference to code.
            with open_checkpoint(path, self.options) as directory:
                return bool(find_damage(directory))
        return isinstance(error, errors.IncompleteCheckpointError | errors.CheckpointNotFound)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file through ``inner``, with a warning if no resume could read a value."""
        self.unreadable.warn_of(list_lightning_parts(checkpoint))
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
        super().__init__(pl.plugins.TorchCheckpointIO(), trusted, options)
        require_code_directory("DeterminedCheckpointIO", code_dir)
        self._code = CodeCopier(code_dir, code_with_secrets)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a directory at ``path``, or replace the directory there.

        Raises:
            InvalidCheckpointException: the checkpoint is not from a ``TrialModule``.
            CheckpointError: writing fails.
        """
        storage, name = self._open_storage(path)
        files = from_lightning(checkpoint)
        self.unreadable.warn_of(list_parts(files))
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
        return CheckpointStorage(parent or ".", options=self.options), name
