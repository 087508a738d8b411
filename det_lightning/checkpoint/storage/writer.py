"""Writing a checkpoint directory."""

from __future__ import annotations

import contextlib
import json
import pathlib
import pickle
import shutil
import time
from collections.abc import Callable, Iterable

import torch

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.code_copy import CodeCopier
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.load_data import encode_load_data
from det_lightning.checkpoint.format.manifest import MANIFEST_KEY, describe_files, with_checksum
from det_lightning.checkpoint.format.resume_state import read_settings
from det_lightning.checkpoint.format.standard_values import save_state
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import new_id
from det_lightning.checkpoint.storage.staging import StagingDirectory
from det_lightning.checkpoint.storage.transfer import StoredFiles
from det_lightning.escaping import escape
from det_lightning.parts_of_determined import REFERENCE_VERSION

# A disk with less room than this counts as full.
_LITTLE_ROOM_BYTES = 16 * 1024 * 1024
# Including what torch and pickle raise if a state cannot be written.
_WRITE_ERRORS = (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError)


class CheckpointWriter:
    """Writes the checkpoints of one run into a storage.

    Args:
        storage: the storage.
        code_dir: the directory whose files are copied to ``code/``, except those that its ``.detignore`` names and
            those that no trial needs; by default the working directory.
        code_with_secrets: also copy files whose names suggest secrets, such as ``.env``.

    Example:
        >>> from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, CheckpointWriter, TrialState
        >>> storage = CheckpointStorage("checkpoints")
        >>> built_by = {"trial_cls_spec": "model_def:MyTrial", "hparams": {}, "experiment_config": {}}
        >>> content = CheckpointContent({}, TrialState(batches_trained=100), load_data=built_by)
        >>> checkpoint_id = CheckpointWriter(storage).write(content)
        >>> storage.newest() == storage.find(checkpoint_id)
        True
    """

    def __init__(
        self, storage: CheckpointStorage, code_dir: pathlib.Path | None = None, *, code_with_secrets: bool = False
    ) -> None:
        self.storage = storage
        storage_dir = storage.root.local_path if storage.is_local else None
        self._code = CodeCopier(code_dir, storage_dir, code_with_secrets)
        # The checkpoint before the current one, whose code the storage holds, unless writing it failed.
        self._previous_id: str | None = None
        self._latest_id: str | None = None

    def write(
        self,
        content: CheckpointContent,
        checkpoint_id: str | None = None,
        report_written: Callable[[pathlib.Path], None] | None = None,
    ) -> str:
        """Write a checkpoint and return its id.

        If anything fails, the written files are removed; earlier checkpoints stay untouched.

        Args:
            content: the content.
            checkpoint_id: the id; by default a new one.
            report_written: called with the directory once all files but the last are written; it may add files.

        Raises:
            CheckpointError: the files cannot be written.
            StorageError: the storage failed for good.
        """
        staging = self.write_files(content, checkpoint_id or new_id(), report_written)
        self.commit(content, staging)
        return staging.directory.name

    def write_files(
        self,
        content: CheckpointContent,
        checkpoint_id: str,
        report_written: Callable[[pathlib.Path], None] | None = None,
    ) -> StagingDirectory:
        """Write all files but the last; see :meth:`write`."""
        try:
            staging = self.storage.begin(checkpoint_id)
        except OSError as e:
            raise errors.CheckpointError(f"No checkpoint can be written in {escape(self.storage)}: {e}") from e
        self._previous_id = self._latest_id
        self._latest_id = None
        try:
            try:
                self._code.copy(staging.directory / layout.CODE_DIR)
                _write_files(content, staging.directory)
            except _WRITE_ERRORS as e:
                raise _explain(e, staging.directory) from e
            if report_written is not None:
                report_written(staging.directory)
        except BaseException:
            staging.abandon()
            raise
        return staging

    def commit(self, content: CheckpointContent, staging: StagingDirectory) -> None:
        """Write the last file and complete the checkpoint in the storage; see :meth:`write`."""
        try:
            try:
                files = describe_files(staging.directory, {**content.described, **self._code.descriptions})
                entries = {
                    "determined_version": REFERENCE_VERSION,
                    "steps_completed": content.trial_state.batches_trained,
                    "framework": f"torch-{torch.__version__}",
                    "format": "pickle",
                    "time": time.time(),
                    **content.notes,
                    MANIFEST_KEY: files,
                }
                names: Iterable[str] = files
                unchanged = None
                if self.storage.is_local:
                    # Flushing thousands of small files would take minutes; their checksums show a loss.
                    names = files.keys() - self._code.descriptions.keys()
                elif self._previous_id is not None:
                    previous = self.storage.root.checkpoint(self._previous_id)
                    unchanged = StoredFiles(previous, self._code.find_unchanged())
                if content.described:  # other ranks have uploaded what they wrote
                    names = [name for name in names if (staging.directory / name).exists()]
                staging.commit(with_checksum(entries), names, unchanged)
            except _WRITE_ERRORS as e:
                raise _explain(e, staging.directory) from e
        except errors.StorageError:
            raise  # a copy is kept on this machine, and the message names it
        except BaseException:
            staging.abandon()
            raise
        self._latest_id = staging.directory.name


def _explain(error: Exception, directory: pathlib.Path) -> errors.CheckpointError:
    room = ""
    with contextlib.suppress(OSError):  # the directory itself may be missing
        free = shutil.disk_usage(directory.parent).free
        room = f" The disk is full: {free:,} bytes are free." if free < _LITTLE_ROOM_BYTES else ""
    reason = str(error)
    if isinstance(error, RuntimeError) and "inline_container" in reason:  # torch hides the system's error
        reason = f"torch.save() could not write all of a file, as on a full disk or beyond a quota ({error})"
    return errors.CheckpointError(f"Checkpoint {escape(directory)} cannot be written: {reason}.{room}")


def _write_files(content: CheckpointContent, directory: pathlib.Path) -> None:
    """Write all files but ``metadata.json``; first ``load_data.json``, which marks an incomplete checkpoint."""
    load_data = content.load_data or {}
    if not load_data.keys() >= layout.LOAD_DATA_ENTRIES:  # unknown ones are null
        load_data = {**layout.make_load_data(**read_settings(content.resume, load_data)), **load_data}
    try:
        text = json.dumps(load_data, allow_nan=False)
    except (TypeError, ValueError):  # there is something that JSON lacks
        text = encode_load_data(load_data)
    (directory / layout.LOAD_DATA_FILE).write_text(text, encoding="utf-8")
    trial_state = dict(vars(content.trial_state))
    if not content.epochs_known:
        del trial_state["epochs_trained"]
    (directory / layout.TRIAL_STATE_FILE).write_bytes(pickle.dumps(trial_state))
    if content.resume is not None:
        save_state(content.resume.to_dict(), directory / layout.RESUME_FILE)
    if content.lightning is not None:
        save_state(content.lightning, directory / layout.LIGHTNING_FILE)
    if content.is_sharded:
        (directory / layout.SHARDS_DIR).mkdir()
    save_state(content.state, directory / (layout.SHARDED_STATE_FILE if content.is_sharded else layout.STATE_FILE))
    if content.files is not None:
        for path in sorted(content.files.iterdir()):
            shutil.move(path, directory / path.name)
        content.files.rmdir()
