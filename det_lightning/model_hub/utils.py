"""Functions for model-hub trials: ``AttrDict``, arrays of several lengths, downloads, the number of batches."""

from __future__ import annotations

import os
import shutil
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from det_lightning.files.local_files import lock_file

__all__ = ["AttrDict", "compute_num_training_steps", "download_url", "expand_like", "numpify"]


class AttrDict(dict[str, Any]):
    """A dict with items as attributes; nested dicts become ``AttrDict`` too.

    Methods of dicts keep their names: an item called ``items`` is ``d["items"]`` only.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for key, value in self.items():
            if isinstance(value, dict) and not isinstance(value, AttrDict):
                self[key] = AttrDict(value)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"There is no item {name!r}; the items are: {', '.join(map(repr, self)) or 'no items'}."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(f"There is no item {name!r}.") from None


def expand_like(arrays: Sequence[npt.NDArray[Any]], fill: float = -100) -> npt.NDArray[Any]:
    """Return the records of all arrays in one array, with short records filled up.

    Args:
        arrays: of shape (records, length, ...); records and length may differ. Arrays of shape (records,) are joined.
        fill: the value at the end of short records.

    Returns:
        An array of shape (all records, longest length, ...), of a type for the values of all arrays and ``fill``.

    Raises:
        ValueError: there are no arrays, or further dimensions differ.
    """
    if not arrays:
        raise ValueError("expand_like() needs at least one array; got none.")
    shapes = [array.shape for array in arrays]
    if {len(shape) for shape in shapes} == {1}:
        return np.concatenate(arrays)
    if len({(len(shape), shape[2:]) for shape in shapes}) > 1:
        raise ValueError(f"expand_like() needs arrays that differ only in the first two dimensions; got {shapes}.")
    records = sum(shape[0] for shape in shapes)
    length = max(shape[1] for shape in shapes)
    filled = np.full((records, length, *shapes[0][2:]), fill, dtype=np.result_type(np.asarray(fill), *arrays))
    first = 0
    for array in arrays:
        filled[first : first + array.shape[0], : array.shape[1]] = array
        first += array.shape[0]
    return filled


def numpify(x: list[Any] | npt.NDArray[Any] | torch.Tensor) -> npt.NDArray[Any]:
    """Return a list, an array or a tensor of any device as an array; raise a TypeError for other types."""
    if isinstance(x, torch.Tensor):
        array: npt.NDArray[Any] = x.detach().cpu().numpy()
        return array
    if isinstance(x, list | np.ndarray):
        return np.asarray(x)
    raise TypeError(f"numpify() needs a list, an array or a tensor; got {type(x).__name__}.")


def download_url(download_directory: str | os.PathLike[str], url: str) -> str:
    """Download a file, unless the directory has a file of the name; ranks of one machine download once.

    Args:
        download_directory: created if missing.
        url: the last part of the path is the name of the file.

    Returns:
        The path of the file.

    Raises:
        ValueError: the URL names no file.
        OSError: the download failed; no file is left.
    """
    name = Path(urllib.parse.unquote(urllib.parse.urlparse(url).path)).name
    if not name:
        raise ValueError(f"The URL of a file must end in the name of the file; got {url}.")
    directory = Path(download_directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    lock = lock_file(Path(f"{path}.lock"), unprotected=f"several processes may download {name}", wait_s=-1)
    try:
        if not path.exists():
            _download(url, path)
    finally:
        if lock is not None:
            lock.release()
    return str(path)


def _download(url: str, path: Path) -> None:
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with urllib.request.urlopen(url) as response, part.open("wb") as file:
            shutil.copyfileobj(response, file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def compute_num_training_steps(experiment_config: Mapping[str, Any], global_batch_size: int) -> int:
    """Return the number of batches that a trial trains according to the configuration.

    Args:
        experiment_config: with ``searcher.max_length``, or ``max_time`` and ``time_metric``; a length in epochs needs
            ``records_per_epoch``.
        global_batch_size: records in a batch of all slots.

    Raises:
        ValueError: the configuration has no such length.
    """
    unit, length = _find_length(experiment_config.get("searcher") or {})
    if unit == "batches":
        return length
    if unit == "records":
        return length // global_batch_size
    records = experiment_config.get("records_per_epoch")
    if unit == "epochs" and records:
        return length * (int(records) // global_batch_size)
    missing = f"searcher.max_length is {length} epochs, and there is no records_per_epoch" if unit == "epochs" else ""
    raise ValueError(
        "The number of batches, needed for the learning rate, is unknown: "
        f"{missing or 'the configuration has no searcher.max_length with a unit'}. Set the hyperparameter "
        "num_training_steps."
    )


def _find_length(searcher: Mapping[str, Any]) -> tuple[str | None, int]:
    max_length = searcher.get("max_length")
    if isinstance(max_length, Mapping):
        ((unit, length),) = max_length.items()
        return unit, int(length)
    clock = searcher.get("time_metric")
    return (clock, int(searcher["max_time"])) if clock in ("batches", "epochs") else (None, 0)
