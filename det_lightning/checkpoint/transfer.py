"""Moving the files of a checkpoint between this machine and a remote storage."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import tenacity

from det_lightning import errors
from det_lightning.checkpoint.location import Location, explain_errors

__all__ = ["RetryPolicy", "download", "upload"]

logger = logging.getLogger("det_lightning.checkpoint")

# To try again would not help.
_FINAL_ERRORS = (PermissionError, FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError, TypeError)

Progress = Callable[[str, int], None]


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """How often, and after which pauses, a transfer is tried.

    Attributes:
        attempts: number of attempts at each file.
        first_wait_s: pause after the first failure; each further one is twice as long, with some chance in it.
        longest_wait_s: longest pause.
    """

    attempts: int = 6
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0

    def call(self, what: str, action: Callable[[], Any]) -> Any:
        """Return what ``action`` returns, after as many attempts as it takes.

        Raises:
            StorageError: it failed for good; the last failure is its cause.
        """
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.attempts),
            wait=tenacity.wait_random_exponential(multiplier=self.first_wait_s, max=self.longest_wait_s),
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, Exception) and not isinstance(e, _FINAL_ERRORS)),
            before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
            reraise=True,
        )
        with explain_errors(what):
            return retrying(action)


def upload(
    source: pathlib.Path, names: Iterable[str], target: Location, retry: RetryPolicy, progress: Progress | None = None
) -> None:
    """Copy files of a local directory to ``target``.

    Args:
        source: the directory.
        names: paths of the files below it.
        target: the directory that gets them.
        retry: what to do where a file fails.
        progress: is told of each file that has arrived, with its size in bytes.

    Raises:
        StorageError: a file failed for good.
    """
    for name in names:
        file, place = source / name, target / name
        retry.call(f"writing {place}", functools.partial(place.fs.put_file, str(file), place.path))
        if progress is not None:
            progress(name, file.stat().st_size)


def download(
    source: Location, names: Iterable[str], target: pathlib.Path, retry: RetryPolicy, progress: Progress | None = None
) -> None:
    """Copy files below ``source`` to a local directory.

    Args:
        source: the directory.
        names: paths of the files below it.
        target: the local directory.
        retry: what to do where a file fails.
        progress: is told of each file that has arrived, with its size in bytes.

    Raises:
        StorageError: a file failed for good.
        UnsafeCheckpointError: a name would lie outside of ``target``.
    """
    names = list(names)
    outside = [name for name in names if not _is_inside(name)]
    if outside:
        raise errors.UnsafeCheckpointError(
            f"{source} holds files whose names lead out of it: {', '.join(map(repr, outside))}. Nothing was copied."
        )
    for name in names:
        file, place = target / name, source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        retry.call(f"reading {place}", functools.partial(place.fs.get_file, place.path, str(file)))
        if progress is not None:
            progress(name, file.stat().st_size)


def _is_inside(name: str) -> bool:
    path = pathlib.PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name
