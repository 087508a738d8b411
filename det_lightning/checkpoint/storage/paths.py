"""Paths in a storage. Only this module makes them from names, which files and listings may hold in any form."""

from __future__ import annotations

import re
import uuid

from det_lightning import errors
from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR
from det_lightning.checkpoint.storage.location import Location
from det_lightning.escaping import escape

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def new_id() -> str:
    """Return the id of a new checkpoint."""
    return str(uuid.uuid4())


def is_name(name: str) -> bool:
    """Return whether a checkpoint's directory can have this name, which must not lead out of the storage."""
    return name not in ("", ".", "..") and name.casefold() != BOOKKEEPING_DIR and not {"/", "\\", "\0"} & set(name)


def is_own_id(name: str) -> bool:
    """Return whether :func:`new_id` made this id; a name given by Lightning may precede it."""
    before = name[:-36]
    return _UUID.fullmatch(name[-36:]) is not None and (not before or before.endswith("-")) and is_name(name)


def checkpoint_path(root: Location, checkpoint_id: str) -> Location:
    """Return the directory of the checkpoint with this id, whether it exists or not."""
    if not is_name(checkpoint_id):
        raise errors.CheckpointNotFound(
            f"There is no checkpoint {checkpoint_id!r}: an id is the name of a directory in {escape(root)}."
        )
    return root / checkpoint_id


def bookkeeping_path(root: Location, *names: str) -> Location:
    """Return the path of a file or directory that is kept beside the checkpoints."""
    path = root
    for name in (BOOKKEEPING_DIR, *names):
        if path is not root and not is_name(name):
            raise errors.StorageError(f"{name!r} cannot be the name of a file in {escape(path)}.")
        path = path / name
        target = path.link_target()
        if target is not None:
            raise errors.StorageError(
                f"{escape(path)} is a link{f' to {escape(target)}' if target else ''}, and nothing is written or "
                "deleted through a link. Replace it by its target, or remove it."
            )
    return path
