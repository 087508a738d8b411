"""A checkpoint of any storage as a local directory."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import CODE_DIR
from det_lightning.checkpoint.storage.location import Location, explain_errors
from det_lightning.checkpoint.storage.paths import is_name
from det_lightning.checkpoint.storage.transfer import Progress, RetryPolicy, download
from det_lightning.escaping import escape

__all__ = ["open_checkpoint"]


@contextlib.contextmanager
def open_checkpoint(
    url: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    *,
    with_code: bool = False,
    retry: RetryPolicy | None = None,
    progress: Progress | None = None,
) -> Iterator[pathlib.Path]:
    """Give a checkpoint as a local directory, inside of a ``with`` block; a remote one is copied for that time.

    Args:
        url: path or URL of the checkpoint's directory.
        options: see ``CheckpointStorage``.
        with_code: copy ``code/`` too.
        retry: how often a transfer is tried.
        progress: is told of each file that has arrived, with its size in bytes.

    Raises:
        CheckpointNotFound: there is no such directory.
        StorageError: it can not be read.
        UnsafeCheckpointError: the names of its files lead out of it, or one is that of a file and of a directory.
    """
    place = Location.parse(url, options)
    if place.is_local:
        if not place.local_path.is_dir():
            raise errors.CheckpointNotFound(f"There is no checkpoint directory {escape(place)}.")
        # What goes on from a link goes on from the checkpoint that it leads to.
        yield place.resolved().local_path
        return
    if not is_name(place.name):
        raise errors.CheckpointNotFound(f"{place.name!r} in {escape(place)} cannot be the name of a checkpoint.")
    with explain_errors(f"reading {escape(place)}"):
        names = [name for name in place.find_files() if with_code or not name.startswith(f"{CODE_DIR}/")]
    if not names:
        raise errors.CheckpointNotFound(f"There is no checkpoint directory {escape(place)}.")
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as folder:
        directory = pathlib.Path(folder) / place.name
        directory.mkdir()
        download(place, names, directory, retry or RetryPolicy(), progress)
        yield directory
