"""Names of the files of a checkpoint, the places where older releases put them, and what makes one complete.

Determined 0.38 writes ``state_dict.pth``, ``trial_state.pkl``, ``load_data.json``, ``code/`` and, last of all,
``metadata.json``. det_lightning adds ``resume.pth``, with what an exact resume needs beyond that, and, in
``metadata.json``, size and checksum of every file and a checksum of the other entries; Determined ignores all of it.
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
CODE_DIR = "code"

#: Ours: what an exact resume needs beyond Determined's format.
RESUME_FILE = "resume.pth"
#: Ours: what Lightning's own checkpoints hold beyond a trial, such as the state of callbacks.
LIGHTNING_FILE = "lightning.pth"
#: Ours: beside the checkpoints of a storage, what is known of them as a whole.
BOOKKEEPING_DIR = ".det_lightning"
#: In the staging directory of a writer to a remote storage; locked while the writer lives.
STAGING_MARK = ".det_lightning-writer.json"

#: Where releases put the state, the newest first.
STATE_FILES = (STATE_FILE, f"determined/{STATE_FILE}", f"pedl/{STATE_FILE}", "checkpoint.pt")
#: What stood in the place of ``trial_state.pkl`` in older releases.
WORKLOAD_FILE = "workload_sequencer.pkl"

#: What is read of a checkpoint, besides ``metadata.json``, to go on from it.
FILES_READ = (*STATE_FILES, TRIAL_STATE_FILE, LOAD_DATA_FILE, RESUME_FILE, LIGHTNING_FILE)

# Far beyond what a trial needs; a larger one is damaged, or meant to fill the memory: parsed, it takes 20 times that.
_MAX_SMALL_FILE_BYTES = 16 * 1024 * 1024
# Whoever goes through a value calls functions as deep as it is nested.
_MAX_JSON_DEPTH = 100


def find_state_file(directory: pathlib.Path) -> pathlib.Path:
    """Return the file with the weights, where it lies in this or an older release.

    Raises:
        CheckpointNotFound: there is none.
    """
    for name in STATE_FILES:
        if (directory / name).is_file():
            return directory / name
    raise errors.CheckpointNotFound(
        f"{escape(directory)} holds no checkpoint: {' and '.join(STATE_FILES)} are missing."
    )


def require_complete(directory: pathlib.Path) -> None:
    """Raise unless ``directory`` holds a checkpoint that was written to its end.

    The last file to be written is ``metadata.json``. Up to 0.17.7 Determined wrote none, and no ``load_data.json``
    either: a checkpoint that has neither is taken for one of those.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        IncompleteCheckpointError: a file is missing.
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
    """Read one of the small files whole.

    Raises:
        IncompleteCheckpointError: it cannot be read, or is absurdly large.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_SMALL_FILE_BYTES:
            raise errors.IncompleteCheckpointError(
                f"{escape(path)} has {size:,} bytes; a checkpoint's file of that name has a few thousand. It is "
                "damaged, or not what its name says."
            )
        return path.read_bytes()
    except OSError as e:
        raise errors.IncompleteCheckpointError(f"{escape(path)} cannot be read: {e}") from e


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        IncompleteCheckpointError: the file is damaged or holds something else.
    """
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
    """Tell whether JSON is nested so little that any code can go through it."""
    level = [value]
    for _ in range(_MAX_JSON_DEPTH):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [part for parts in inner for part in parts if isinstance(part, dict | list)]
        if not level:
            return True
    return False
