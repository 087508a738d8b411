"""``det-lightning checkpoint export`` and ``import``."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format import exports as exporting
from det_lightning.checkpoint.format.lightning_file import from_lightning
from det_lightning.checkpoint.safe_load import read_checkpoint, read_state
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import Location, explain_errors
from det_lightning.checkpoint.storage.writer import CheckpointWriter
from det_lightning.cli.finding import find_checkpoint, opened
from det_lightning.cli.output import print_json, print_lines, show_progress, warn

__all__ = ["export_checkpoint", "import_checkpoint"]


def export_checkpoint(
    url: str, options: Mapping[str, Any], kind: str, output: str, force: bool, trusted: bool, as_json: bool
) -> None:
    """Write a checkpoint as a single file, and print where."""
    file = _require_free(output, force)
    place = find_checkpoint(url, options)
    left_out: list[str] = []
    with opened(place, options) as directory:
        content = read_checkpoint(directory, trusted=trusted)
        if kind == "lightning":
            exporting.export_lightning(content, file)
        elif kind == "weights":
            exporting.export_weights(content, file)
        else:
            left_out = exporting.export_safetensors(content, file)
    if left_out:
        warn(f"Left out, since they are no tensors: {', '.join(left_out)}")
    if as_json:
        print_json({"path": str(file), "bytes": file.stat().st_size, "left_out": left_out})
    else:
        print_lines([str(file)])


def import_checkpoint(
    url: str, storage_url: str, options: Mapping[str, Any], any_module: bool, trusted: bool, as_json: bool
) -> None:
    """Write a ``.ckpt`` file as a new checkpoint, and print its id."""
    storage = CheckpointStorage(storage_url, options=options)
    with _local_file(url, options) as file:
        try:
            files = from_lightning(read_state(file, trusted=trusted), any_module=any_module)
        except errors.InvalidCheckpointException as e:
            raise errors.InvalidCheckpointException(f"{url} can not be imported: {e}") from e
    files.notes["imported_from"] = url.rpartition("/")[2]
    # The file holds no code of the trial, and the working directory is not it.
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as empty:
        checkpoint_id = CheckpointWriter(storage, pathlib.Path(empty)).write(files)
    if as_json:
        print_json({"uuid": checkpoint_id, "path": str(storage.root / checkpoint_id)})
    else:
        print_lines([checkpoint_id])


def _require_free(output: str, force: bool) -> pathlib.Path:
    if "://" in output:
        raise ValueError(f"--output takes the path of a local file; got {output!r}.")
    file = pathlib.Path(output).expanduser()
    if file.is_dir() or not file.name:
        raise ValueError(f"--output takes the path of a file; {output!r} is a directory.")
    if not file.parent.is_dir():
        raise ValueError(f"--output {output!r}: there is no directory {file.parent}.")
    if file.exists() and not force:
        raise ValueError(f"--output {output!r} exists; --force replaces it.")
    return file


@contextlib.contextmanager
def _local_file(url: str, options: Mapping[str, Any]) -> Iterator[pathlib.Path]:
    place = Location.parse(url, options)
    with explain_errors(f"reading {place}"):
        if not place.exists():
            raise errors.CheckpointNotFound(f"There is no file {place}.")
        if place.is_dir():
            raise ValueError(f"{place} is a directory; import takes a .ckpt file of Lightning's.")
        size = int(place.fs.size(place.path) or 0)
    if place.is_local:
        yield place.local_path
        return
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as folder:
        file = pathlib.Path(folder) / "file.ckpt"
        with show_progress(f"Reading {place.name}", size) as progress, explain_errors(f"reading {place}"):
            place.fs.get_file(place.path, str(file))
            progress(place.name, size)
        yield file
