"""Names of the files of a checkpoint in this and older releases, and what makes a checkpoint complete.

Determined 0.38 writes ``state_dict.pth``, ``trial_state.pkl``, ``load_data.json``, ``code/`` and, last of all,
``metadata.json``. det_lightning adds ``resume.pth``, with the rest of the state for an exact resume, and a manifest in
``metadata.json``; Determined ignores both. A sharded checkpoint has ``shards/`` in place of ``state_dict.pth``, and
Determined cannot read it; see ``det_lightning/checkpoint/format/shards.py``.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from det_lightning import errors
from det_lightning.escaping import escape

STATE_FILE = "state_dict.pth"
TRIAL_STATE_FILE = "trial_state.pkl"
LOAD_DATA_FILE = "load_data.json"
METADATA_FILE = "metadata.json"
#: In checkpoints of TensorFlow Estimators, whose weights are in the files that it names.
TENSORFLOW_FILE = "checkpoint"
CODE_DIR = "code"

#: det_lightning's own: what an exact resume needs beyond Determined's format.
RESUME_FILE = "resume.pth"
#: det_lightning's own: what Lightning's checkpoints hold beyond a trial, such as the state of callbacks.
LIGHTNING_FILE = "lightning.pth"
#: det_lightning's own: the directory in a sharded checkpoint with what each rank held, and in it all that is whole.
SHARDS_DIR = "shards"
SHARDED_STATE_FILE = f"{SHARDS_DIR}/state.pth"
#: det_lightning's own: the directory beside the checkpoints of a storage with indexes, marks and leases.
BOOKKEEPING_DIR = ".det_lightning"
#: In the staging directory of a writer to a remote storage; locked while the writer lives.
STAGING_MARK = ".det_lightning-writer.json"

#: det_lightning's own: the entry of ``metadata.json`` with what Determined's master knew about a checkpoint of
#: Determined, added later; and in it when the file was written before, in seconds since 1970.
MASTER_KEY = "master"
WRITTEN_KEY = "written_before_s"

#: Where releases put the state, the newest first; at the end, where a sharded checkpoint has it.
STATE_FILES = (
    STATE_FILE,
    f"determined/{STATE_FILE}",
    f"pedl/{STATE_FILE}",
    "checkpoint.pt",
    TENSORFLOW_FILE,
    SHARDED_STATE_FILE,
)
#: The name of ``trial_state.pkl`` in older releases.
WORKLOAD_FILE = "workload_sequencer.pkl"

#: The files that are read to resume from a checkpoint, besides ``metadata.json``.
FILES_READ = (*STATE_FILES, TRIAL_STATE_FILE, LOAD_DATA_FILE, RESUME_FILE, LIGHTNING_FILE)

#: Far more than a trial needs; a larger file is damaged, or meant to fill the memory: parsed, it takes 20 times that.
MAX_SMALL_FILE_BYTES = 16 * 1024 * 1024
# Code that walks a value calls functions as deep as it is nested.
_MAX_JSON_DEPTH = 100


def find_state_file(directory: pathlib.Path) -> pathlib.Path:
    """Return the file with the weights, under its name in this or an older release."""
    for name in STATE_FILES:
        if (directory / name).is_file():
            return directory / name
    raise errors.CheckpointNotFound(
        f"{escape(directory)} holds no checkpoint: {' and '.join(STATE_FILES)} are missing."
    )


def find_files_of_tensorflow(directory: pathlib.Path) -> list[str]:
    """Return the names of the files in ``directory`` that TensorFlow has written, or may read."""
    ours = {*FILES_READ, METADATA_FILE} - {TENSORFLOW_FILE}
    files = [path.relative_to(directory) for path in directory.rglob("*") if path.is_file()]
    return sorted(path.as_posix() for path in files if path.parts[0] != CODE_DIR and path.as_posix() not in ours)


def is_sharded(directory: pathlib.Path, state_file: pathlib.Path) -> bool:
    """Return whether the state file of a checkpoint is that of a sharded one."""
    return state_file == directory / SHARDED_STATE_FILE


def require_complete(directory: pathlib.Path) -> None:
    """Raise unless ``directory`` holds a complete checkpoint.

    The last file to be written is ``metadata.json``. Up to 0.17.7 Determined wrote neither that nor ``load_data.json``:
    a checkpoint without both counts as one of those releases.
    """
    if not directory.is_dir():
        raise errors.CheckpointNotFound(f"There is no checkpoint directory {escape(directory)}.")
    has_metadata = (directory / METADATA_FILE).is_file()
    try:
        find_state_file(directory)
    except errors.CheckpointNotFound as e:
        if has_metadata:
            raise errors.IncompleteCheckpointError(
                f"{escape(directory)} is an incomplete checkpoint: {STATE_FILE} is missing; use another checkpoint."
            ) from e
        raise
    if not has_metadata and any((directory / name).exists() for name in (LOAD_DATA_FILE, RESUME_FILE)):
        raise errors.IncompleteCheckpointError(
            f"{escape(directory)} is an incomplete checkpoint: {METADATA_FILE} is missing. It was not written to its "
            "end; use an earlier checkpoint."
        )


def read_bytes(path: pathlib.Path) -> bytes:
    """Read one of the small files; raise an ``IncompleteCheckpointError`` if it is large or cannot be read."""
    try:
        size = path.stat().st_size
        if size > MAX_SMALL_FILE_BYTES:
            raise errors.IncompleteCheckpointError(
                f"{escape(path)} has {size:,} bytes; a checkpoint's file of that name has a few thousand. It is "
                "damaged, or another kind of file."
            )
        return path.read_bytes()
    except OSError as e:
        raise errors.IncompleteCheckpointError(f"{escape(path)} cannot be read: {e}") from e


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; raise an ``IncompleteCheckpointError`` if it does not."""
    content = read_bytes(path)
    try:
        parsed = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise errors.IncompleteCheckpointError(f"{escape(path)} cannot be read, it may be damaged: {e}") from e
    if not isinstance(parsed, dict):
        raise errors.IncompleteCheckpointError(
            f"{escape(path)} should hold a JSON object; got {type(parsed).__name__}."
        )
    if not is_shallow(parsed):
        raise errors.IncompleteCheckpointError(
            f"{escape(path)} is damaged: its values are nested over {_MAX_JSON_DEPTH} deep."
        )
    return parsed


def is_shallow(value: Any) -> bool:
    """Return whether parsed JSON is nested so little that any code can walk it."""
    level = [value]
    for _ in range(_MAX_JSON_DEPTH):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [part for parts in inner for part in parts if isinstance(part, dict | list)]
        if not level:
            return True
    return False
