"""Paths in a storage: the one module that makes them from names, which files and listings may hold in any form."""

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
    """Tell whether a checkpoint's directory can have this name: it leads nowhere but into the storage."""
    return name not in ("", ".", "..") and name.casefold() != BOOKKEEPING_DIR and not {"/", "\\", "\0"} & set(name)


def is_own_id(name: str) -> bool:
    """Tell whether this is an id that :func:`new_id` made; a name of Lightning's may stand before it."""
    before = name[:-36]
    own = name[-36:]
    return _UUID.fullmatch(own) is not None and (not before or before.endswith("-")) and is_name(name)


def checkpoint_path(root: Location, checkpoint_id: str) -> Location:
    """Return the directory of the checkpoint with this id, whether there is one or not.

    Raises:
        CheckpointNotFound: no checkpoint can have this id.
    """
    if not is_name(checkpoint_id):
        raise errors.CheckpointNotFound(
            f"There is no checkpoint {checkpoint_id!r}: an id is the name of a directory in {escape(root)}."
        )
    return root / checkpoint_id


def bookkeeping_path(root: Location, *names: str) -> Location:
    """Return the path of a file or directory that is kept beside the checkpoints.

    Raises:
        StorageError: a name would lead elsewhere, or the path leads through a link.
    """
    place = root / BOOKKEEPING_DIR
    _require_no_link(place)
    for name in names:
        if not is_name(name):
            raise errors.StorageError(f"{name!r} cannot be the name of a file in {escape(place)}.")
        place = place / name
        _require_no_link(place)
    return place


def _require_no_link(place: Location) -> None:
    target = place.link_target()
    if target is not None:
        raise errors.StorageError(
            f"{escape(place)} is a link{f' to {escape(target)}' if target else ''}, and nothing is written or deleted "
            "through a link. Replace it by what it leads to, or remove it."
        )
