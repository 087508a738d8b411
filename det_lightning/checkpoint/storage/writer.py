"""Writing a checkpoint directory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.code_copy import CodeCopier
from det_lightning.checkpoint.format.manifest import MANIFEST_KEY, describe_files, with_checksum
from det_lightning.checkpoint.format.trial_state import TrialState
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.paths import new_id
from det_lightning.checkpoint.storage.staging import Place
from det_lightning.escaping import escape
from det_lightning.masking import describe_masked

__all__ = ["CheckpointFiles", "CheckpointWriter"]

# The release whose format is written.
_FORMAT_VERSION = "0.38.1"
# With less than this a disk counts as full.
_LITTLE_ROOM_BYTES = 16 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class CheckpointFiles:
    """What goes into the files of a checkpoint.

    Attributes:
        state: ``state_dict.pth``.
        trial_state: ``trial_state.pkl``; how far the trial has come.
        load_data: ``load_data.json``; how to build the trial again.
        resume: ``resume.pth``; what an exact resume needs beyond Determined's format.
        lightning: ``lightning.pth``; what Lightning keeps beyond the trial. None if Lightning keeps nothing.
        notes: entries of ``metadata.json`` beyond those of Determined.
        epochs_known: ``trial_state`` tells the number of epochs.
        copies: tensors of ``state`` that nothing else uses, so that they need not be copied to be written later.
    """

    state: dict[str, Any]
    trial_state: TrialState
    load_data: dict[str, Any]
    resume: dict[str, Any] | None
    lightning: dict[str, Any] | None = None
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    epochs_known: bool = True
    copies: Sequence[torch.Tensor] = ()

    def write(self, directory: pathlib.Path) -> None:
        """Write all files but ``metadata.json``.

        ``load_data.json`` comes first: where it is and ``metadata.json`` is not, a checkpoint was cut off.
        """
        load_data = json.dumps(self.load_data, default=describe_masked)
        (directory / layout.LOAD_DATA_FILE).write_text(load_data, encoding="utf-8")
        trial_state = dict(vars(self.trial_state))
        if not self.epochs_known:
            del trial_state["epochs_trained"]
        (directory / layout.TRIAL_STATE_FILE).write_bytes(pickle.dumps(trial_state))
        if self.resume is not None:
            torch.save(self.resume, directory / layout.RESUME_FILE)
        if self.lightning is not None:
            torch.save(self.lightning, directory / layout.LIGHTNING_FILE)
        torch.save(self.state, directory / layout.STATE_FILE)

    def metadata(self, directory: pathlib.Path) -> dict[str, Any]:
        """Return the content of ``metadata.json`` for the files that lie in ``directory``."""
        entries = {
            "determined_version": _FORMAT_VERSION,
            "steps_completed": self.trial_state.batches_trained,
            "framework": f"torch-{torch.__version__}",
            "format": "pickle",
            "time": time.time(),
            **self.notes,
            MANIFEST_KEY: describe_files(directory),
        }
        return with_checksum(entries)


class CheckpointWriter:
    """Writes checkpoints of one run into a storage.

    Args:
        storage: where to.
        code_dir: the directory whose files are copied to ``code/``, less what its ``.detignore`` names and what no
            trial needs; see ``CodeCopier``.
        code_with_secrets: copy files under whose names secrets are kept too, such as ``.env``.
    """

    def __init__(
        self, storage: CheckpointStorage, code_dir: pathlib.Path | None = None, *, code_with_secrets: bool = False
    ) -> None:
        self.storage = storage
        storage_dir = storage.root.local_path if storage.is_local else None
        self._code = CodeCopier(code_dir, storage_dir, code_with_secrets)

    def write(
        self,
        files: CheckpointFiles,
        checkpoint_id: str | None = None,
        tell_written: Callable[[pathlib.Path], None] | None = None,
    ) -> str:
        """Write a checkpoint and return its id.

        If anything fails what was written is removed, and earlier checkpoints stay as they are.

        Args:
            files: the content.
            checkpoint_id: the id; by default a new one.
            tell_written: is told the directory when all files but the last are there, and may add some.

        Raises:
            CheckpointError: the files can not be written.
            StorageError: the storage failed for good.
        """
        place = self.write_files(files, checkpoint_id or new_id(), tell_written)
        self.commit(files, place)
        return place.directory.name

    def write_files(
        self,
        files: CheckpointFiles,
        checkpoint_id: str,
        tell_written: Callable[[pathlib.Path], None] | None = None,
    ) -> Place:
        """Write all files but the last; see :meth:`write`."""
        try:
            place = self.storage.begin(checkpoint_id)
        except OSError as e:
            raise errors.CheckpointError(f"No checkpoint can be written in {escape(self.storage)}: {e}") from e
        try:
            with _writing_to(place.directory):
                self._code.copy(place.directory / layout.CODE_DIR)
                files.write(place.directory)
            if tell_written is not None:
                tell_written(place.directory)
        except BaseException:
            place.abandon()
            raise
        return place

    def commit(self, files: CheckpointFiles, place: Place) -> None:
        """Write the last file and bring the checkpoint into the storage; see :meth:`write`."""
        try:
            with _writing_to(place.directory):
                place.commit(files.metadata(place.directory))
        except errors.StorageError:
            raise  # a copy is kept on this machine, and was named
        except BaseException:
            place.abandon()
            raise


@contextlib.contextmanager
def _writing_to(directory: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError) as e:
        room = ""
        with contextlib.suppress(OSError):  # the directory itself may be what is gone
            free = shutil.disk_usage(directory.parent).free
            room = f" The disk is full: {free:,} bytes are free." if free < _LITTLE_ROOM_BYTES else ""
        raise errors.CheckpointError(f"Checkpoint {escape(directory)} can not be written: {_reason(e)}.{room}") from e


def _reason(error: Exception) -> str:
    if isinstance(error, RuntimeError) and "inline_container" in str(error):
        # torch does not tell what the system told it.
        return f"torch.save() could not write all of a file, as on a full disk or beyond a quota ({error})"
    return str(error)
