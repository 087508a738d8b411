"""Functions of ``determined.util`` for scripts and trials, at the same import path."""

from __future__ import annotations

import copy
import inspect
import itertools
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

from det_lightning import errors
from det_lightning.missing_parts import attribute_error

__all__ = ["download_gcs_blob_with_backoff", "filter_duplicates", "has_param", "is_overridden", "merge_dicts"]

__path__: list[str] = []  # the import of a missing name becomes an error with the reason

# Answers of the server after which another attempt would not help.
_REFUSALS = (401, 403, 404)


def download_gcs_blob_with_backoff(blob: Any, n_retries: int = 32, max_backoff: int = 32) -> bytes:
    """Return the content of a ``google.cloud.storage.Blob``, with up to ``n_retries`` attempts.

    Random generators stay unchanged, so that a retry does not influence training.

    Args:
        blob: the blob.
        n_retries: number of attempts.
        max_backoff: longest pause between two attempts, in seconds. The first pause is a second; each pause doubles.

    Raises:
        TypeError: ``blob`` cannot be downloaded.
        StorageError: there is no blob or no permission, without a retry; or all attempts have failed.

    Example:
        >>> from det_lightning.util import download_gcs_blob_with_backoff
        >>> download_gcs_blob_with_backoff("gs://bucket/train.csv")
        Traceback (most recent call last):
            ...
        TypeError: download_gcs_blob_with_backoff() takes a google.cloud.storage.Blob; got one of type str.

        Pass ``google.cloud.storage.Client().bucket("bucket").blob("train.csv")`` instead.
    """
    if not callable(getattr(blob, "download_as_bytes", None)):
        raise TypeError(
            "download_gcs_blob_with_backoff() takes a google.cloud.storage.Blob; got one of type "
            f"{type(blob).__name__}."
        )

    before = random.getstate()  # the library draws its own pauses from the trial's generator
    try:
        return _download(blob, n_retries, max_backoff)
    finally:
        random.setstate(before)


def _download(blob: Any, attempts: int, longest_wait_s: float) -> bytes:
    for attempt in itertools.count():
        try:
            content: bytes = blob.download_as_bytes()
            return content
        except Exception as error:
            if getattr(error, "code", 0) in _REFUSALS or attempt + 1 >= attempts:
                name = getattr(blob, "name", blob)
                raise errors.StorageError(
                    f"Failed while downloading {name}: {type(error).__name__}: {error}"
                ) from error
        time.sleep(min(2.0**attempt, longest_wait_s))
    raise AssertionError("unreachable")


def merge_dicts(base_dict: dict[Any, Any], source_dict: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of ``base_dict`` updated with ``source_dict``; nested dicts are merged in the same way.

    Example:
        >>> from det_lightning.util import merge_dicts
        >>> merge_dicts({"optimizer": {"lr": 0.1, "momentum": 0.9}}, {"optimizer": {"lr": 0.2}})
        {'optimizer': {'lr': 0.2, 'momentum': 0.9}}
    """
    merged = copy.deepcopy(base_dict)
    for key, value in source_dict.items():
        nested = key in base_dict and isinstance(value, dict)
        merged[key] = merge_dicts(base_dict[key], value) if nested else value
    return merged


def is_overridden(full_method: Any, parent_class: type) -> bool:
    """Return whether a method is defined elsewhere than in ``parent_class``; False unless callable.

    Example:
        >>> from det_lightning.pytorch import PyTorchTrial
        >>> from det_lightning.util import is_overridden
        >>> from model_def import MyTrial
        >>> is_overridden(MyTrial.evaluate_batch, PyTorchTrial), is_overridden(MyTrial.evaluation_reducer, PyTorchTrial)
        (True, False)
    """
    return callable(full_method) and full_method.__qualname__.partition(".")[0] != parent_class.__name__


def has_param(fn: Callable[..., Any], name: str, pos: int | None = None) -> bool:
    """Return whether a function has an argument with this name, or at this position, counted from 0.

    Example:
        >>> from det_lightning.util import has_param
        >>> has_param(lambda batch, batch_idx: None, "batch_idx"), has_param(lambda batch: None, "other", pos=0)
        (True, True)
    """
    arguments = inspect.getfullargspec(fn).args
    return name in arguments or (pos is not None and pos < len(arguments))


def filter_duplicates(in_list: Iterable[Any], sorter: Callable[[Any], list[Any]] = sorted) -> set[Any]:
    """Return all values that occur in ``in_list`` more than once; ``sorter`` must make equal values neighbours.

    Example:
        >>> from det_lightning.util import filter_duplicates
        >>> filter_duplicates(["a", "b", "a"])
        {'a'}
    """
    in_order = sorter(in_list)
    return {value for value, following in itertools.pairwise(in_order) if value == following}


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
