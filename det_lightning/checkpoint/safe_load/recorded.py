"""State files that an experiment knows: it recorded their SHA-256 when its trial wrote them, so it may trust them."""

from __future__ import annotations

import logging
import pathlib
import tempfile
from collections.abc import Collection
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.digests import copy_and_digest, digest_file
from det_lightning.checkpoint.safe_load.state_file import read_state
from det_lightning.escaping import escape

logger = logging.getLogger(__name__)


def read_known_state(path: pathlib.Path, *, trusted: bool = False, recorded: Collection[str] = ()) -> dict[str, Any]:
    """Read a state file as ``read_state`` does; trust one that it refuses if its SHA-256 is among ``recorded``."""
    try:
        return read_state(path, trusted=trusted)
    except errors.CheckpointError as refused:
        try:
            state = _read_recorded(path, recorded) if recorded else None
        except OSError as e:
            logger.warning("%s is not read with its objects, since it cannot be copied: %s.", escape(path), e)
            raise refused from e
        if state is None:
            raise
        return state


def _read_recorded(path: pathlib.Path, recorded: Collection[str]) -> dict[str, Any] | None:
    """Return the state in a file whose SHA-256 is among ``recorded``, with its objects; None for any other file."""
    if digest_file(path) not in recorded:
        return None
    # Nobody else can change the copy after its digest is known.
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as folder:
        copy = pathlib.Path(folder, path.name)
        if copy_and_digest(path, copy) not in recorded:
            return None
        logger.info("%s is read with its objects: it is as this trial wrote it.", escape(path))
        return read_state(copy, trusted=True, name=path)
