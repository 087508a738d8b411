"""Where checkpoints lie: one directory for each, named by its id, below a common root."""

from __future__ import annotations

import difflib
import os
import pathlib
import uuid

import platformdirs

from det_lightning import errors
from det_lightning.checkpoint.format import METADATA_FILE

__all__ = ["CheckpointStorage"]


class CheckpointStorage:
    """A directory of checkpoints.

    Args:
        root: the directory; by default the one that Determined uses for local runs, so that their checkpoints are
            found.

    Raises:
        ValueError: ``root`` is a URL; this version writes to local directories.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        root = platformdirs.user_data_dir("determined") if root is None else os.fspath(root)
        if "://" in root and not root.startswith("file://"):
            raise ValueError(f"Checkpoints go to a local directory in this version; got the URL {root!r}.")
        self.root = pathlib.Path(root.removeprefix("file://")).expanduser()

    def new(self) -> tuple[str, pathlib.Path]:
        """Make the directory of a new checkpoint; return its id and its path."""
        checkpoint_id = str(uuid.uuid4())
        directory = self.root / checkpoint_id
        directory.mkdir(parents=True)
        return checkpoint_id, directory

    def list_ids(self) -> list[str]:
        """Return the ids of the complete checkpoints."""
        return sorted(path.parent.name for path in self.root.glob(f"*/{METADATA_FILE}"))

    def find(self, id_or_path: str | os.PathLike[str]) -> pathlib.Path:
        """Return the directory of a checkpoint.

        Args:
            id_or_path: the id of a checkpoint in this storage, or the path of any checkpoint's directory.

        Raises:
            CheckpointNotFound: there is none; similar ids are named.
        """
        name = os.fspath(id_or_path)
        for candidate in (self.root / name, pathlib.Path(name.removeprefix("file://")).expanduser()):
            if candidate.is_dir():
                return candidate
        known = self.list_ids()
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
        hint = f"Similar ids: {', '.join(near)}." if near else f"{len(known)} other checkpoints are there."
        raise errors.CheckpointNotFound(
            f"There is no checkpoint {name!r}, neither as a directory nor as an id in {self.root}. {hint}"
        )
