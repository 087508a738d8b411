"""Converting a sharded checkpoint into Determined's format."""

from __future__ import annotations

import pathlib
import shutil
import tempfile

from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.code_copy import CodeCopier
from det_lightning.checkpoint.format.manifest import CHECKSUM_KEY, split_code
from det_lightning.checkpoint.safe_load import read_checkpoint
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.escaping import escape


def merge_checkpoint(directory: pathlib.Path, storage: CheckpointStorage, *, trusted: bool = False) -> str:
    """Write the sharded checkpoint in a directory as a new one in Determined's format; return its id.

    It has the same code, metadata and resume state. Meanwhile the whole state is held in main memory. If ``trusted``,
    unpickle anything, and run any code that the files ask for. Raise a ``ValueError`` if the checkpoint is not sharded,
    and a ``CheckpointError`` if it cannot be read, or the new one cannot be written.
    """
    if not layout.is_sharded(directory, layout.find_state_file(directory)):
        raise ValueError(f"{escape(directory)} is not sharded: it is in Determined's format already.")
    content = read_checkpoint(directory, trusted=trusted)
    code_files, _ = split_code(directory, trusted=trusted)
    metadata = layout.read_json(directory / layout.METADATA_FILE)
    metadata.pop(CHECKSUM_KEY, None)
    content.notes = {**metadata, "merged_from": directory.name}
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as folder:
        # Not the directory itself: a file of the code could be taken for the mark of a killed writer there.
        code = pathlib.Path(folder, layout.CODE_DIR)
        code.mkdir()
        for name in code_files:
            copy = code / pathlib.PurePosixPath(name).relative_to(layout.CODE_DIR)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(directory / name, copy)
        # Secrets were left out, or not, when the sharded checkpoint was written.
        return storage.write(content, code=CodeCopier(code, with_secrets=True))
