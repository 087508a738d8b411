"""Links in a checkpoint, which may lead to files that are not part of it."""

from __future__ import annotations

import os
import pathlib

from det_lightning import errors
from det_lightning.checkpoint.format.layout import CODE_DIR
from det_lightning.escaping import escape


def require_inside(directory: pathlib.Path) -> None:
    """Raise an ``UnsafeCheckpointError`` that names each link which leads out of the checkpoint in ``directory``.

    ``directory`` may be a link itself. ``code/`` is not looked at: no link in it is ever followed.
    """
    root = directory.resolve()
    found = []
    for folder, folders, files in os.walk(directory):
        if pathlib.Path(folder) == directory and CODE_DIR in folders:
            folders.remove(CODE_DIR)
        for path in (pathlib.Path(folder, name) for name in sorted([*folders, *files])):
            if path.is_symlink() and not _target(path).is_relative_to(root):
                found.append(f"{escape(path)} is a link to {escape(_target(path))}")
    if found:
        raise errors.UnsafeCheckpointError(
            f"{'; '.join(found):.2000}: nothing is read through a link that leads out of its checkpoint. Put a copy of "
            "the target in its place."
        )


def _target(link: pathlib.Path) -> pathlib.Path:
    try:
        return link.resolve()
    except (OSError, RuntimeError):  # links that lead to one another
        return pathlib.Path(os.path.abspath(link.parent / os.readlink(link)))  # noqa: PTH100, PTH115 (keeps links)
