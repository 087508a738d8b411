"""Writing the files of a checkpoint to a staging directory; ``metadata.json`` with the manifest comes last."""

from __future__ import annotations

import contextlib
import json
import pathlib
import pickle
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.code_copy import CodeCopier
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.manifest import MANIFEST_KEY, describe_files, with_checksum
from det_lightning.checkpoint.format.resume_state import SPELLED, read_settings
from det_lightning.checkpoint.format.standard_values import save_state
from det_lightning.checkpoint.storage.staging import StagingDirectory
from det_lightning.checkpoint.storage.transfer import StoredFiles
from det_lightning.escaping import get_logger
from det_lightning.files.plain_values import MOST_IN_SETTINGS, NotPlainError, as_plain
from det_lightning.files.strict_json import spell_numbers, to_json
from det_lightning.parts_of_determined import REFERENCE_VERSION

logger = get_logger(__name__)

# A disk with less room than this counts as full.
_LITTLE_ROOM_BYTES = 16 * 1024 * 1024
# Including what torch and pickle raise if a state cannot be written.
_WRITE_ERRORS = (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError)

#: Called with a staging directory once all files but the last are written.
ReportWritten = Callable[[pathlib.Path], None]


def write_files(
    staging: StagingDirectory, content: CheckpointContent, code: CodeCopier, report_written: ReportWritten | None = None
) -> None:
    """Write all files but ``metadata.json``; abandon the staging directory after a failure."""
    with _writing(staging):
        code.copy(staging.directory / layout.CODE_DIR, storage=staging.directory.parent)
        _write_files(content, staging.directory)
    if report_written is not None:
        with staging:
            report_written(staging.directory)


def complete(
    staging: StagingDirectory, content: CheckpointContent, code: CodeCopier, announce: ReportWritten | None = None
) -> str:
    """Write ``metadata.json`` with the manifest, and publish the checkpoint; return the id.

    Call ``announce`` with the directory before. Abandon the staging directory after a failure, except if the storage
    fails for good: then a complete copy stays.
    """
    directory = staging.directory
    with _writing(staging):
        if announce is not None:
            announce(directory)
        files = describe_files(directory, {**content.described, **code.descriptions})
        entries = {
            "determined_version": REFERENCE_VERSION,
            "steps_completed": content.trial_state.batches_trained,
            "framework": f"torch-{torch.__version__}",
            "format": "pickle",
            "time": time.time(),
            **content.notes,
            MANIFEST_KEY: files,
        }
        names: Collection[str] = files
        unchanged = None
        if staging.root.is_local:
            # Flushing thousands of small files would take minutes; their checksums show a loss.
            names = files.keys() - code.descriptions.keys()
        elif code.previous is not None and code.previous[0] == staging.root:
            unchanged = StoredFiles(staging.root.checkpoint(code.previous[1]), code.find_unchanged())
        if content.described:  # other ranks have uploaded what they wrote
            names = [name for name in names if (directory / name).exists()]
        staging.commit(with_checksum(entries), names, unchanged)
    code.latest = (staging.root, directory.name)
    return directory.name


@contextlib.contextmanager
def _writing(staging: StagingDirectory) -> Iterator[None]:
    """Turn an error in writing a checkpoint into a ``CheckpointError``, and abandon the checkpoint after any error."""
    try:
        yield
    except BaseException as e:
        explained = _explain(e, staging.directory) if isinstance(e, _WRITE_ERRORS) else None
        if not staging.is_kept:
            staging.abandon()
        if explained is None:
            raise
        raise explained from e


def _explain(error: Exception, directory: pathlib.Path) -> errors.CheckpointError:
    room = ""
    with contextlib.suppress(OSError):  # the directory itself may be missing
        free = shutil.disk_usage(directory.parent).free
        room = f" The disk is full: {free:,} bytes are free." if free < _LITTLE_ROOM_BYTES else ""
    reason = str(error)
    if isinstance(error, RuntimeError) and "inline_container" in reason:  # torch hides the system's error
        reason = f"torch.save() could not write all of a file, as on a full disk or beyond a quota ({error})"
    return errors.CheckpointError(f"Checkpoint {directory} cannot be written: {reason}.{room}")


def _write_files(content: CheckpointContent, directory: pathlib.Path) -> None:
    """Write all files but ``metadata.json``; first ``load_data.json``, which marks an incomplete checkpoint."""
    load_data = content.load_data or {}
    if not load_data.keys() >= layout.LOAD_DATA_ENTRIES:  # unknown ones are null
        load_data = {**layout.make_load_data(**read_settings(content.resume, load_data)), **load_data}
    try:
        text = json.dumps(load_data, allow_nan=False)
    except (TypeError, ValueError):  # there is something that JSON lacks
        text = _encode_load_data(load_data)
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


def _encode_load_data(load_data: Mapping[str, Any]) -> str:
    """Return the text of ``load_data.json``; leave out values that JSON cannot hold, and name these in a warning."""
    losses: list[str] = []
    places = list(load_data.get(SPELLED) or [])
    content = {}
    for name, value in load_data.items():
        if name == SPELLED:
            continue
        try:
            plain = as_plain(value, name, losses, MOST_IN_SETTINGS)
        except NotPlainError as e:
            losses.append(str(e).removesuffix("."))
        else:
            content[name] = spell_numbers(plain, name, places)
    if losses:
        logger.warning("The checkpoint cannot hold all values: %s.", "; ".join(losses))
    if places:
        content[SPELLED] = places
    return to_json(content)
