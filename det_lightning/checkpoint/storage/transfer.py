"""Bringing files to and from a storage, as often as it takes, and a checkpoint of any storage as a local directory."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import logging
import os
import pathlib
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tenacity

from det_lightning import errors
from det_lightning.checkpoint.format.layout import CODE_DIR
from det_lightning.checkpoint.storage.location import Location, explain_errors
from det_lightning.checkpoint.storage.paths import is_name
from det_lightning.escaping import escape
from det_lightning.masking import mask_text

logger = logging.getLogger(__name__)

# How often a transfer that pauses looks whether the run ends, and how long it pauses then.
_POLL_S = 0.1
_LAST_WAIT_S = 1.0

# To try again would not help.
_FINAL_ERRORS = (PermissionError, FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError, TypeError)
_FINAL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError")  # of botocore, which need not be installed

# The global generator belongs to the trial: a transfer that is tried again must not change what is trained.
_OWN_RANDOM = random.Random()

Progress = Callable[[str, int], None]


def _never() -> bool:
    return False


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """How often, and after which pauses, a transfer is tried.

    Attributes:
        attempts: number of attempts at each file.
        first_wait_s: pause after the first failure; each further one is twice as long, with some chance in it.
        longest_wait_s: longest pause.
        is_ending: tells whether the process was asked to end. A transfer that fails is tried once more then, after a
            pause of a second at most.
    """

    attempts: int = 6
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0
    is_ending: Callable[[], bool] = dataclasses.field(default=_never, repr=False, compare=False)

    def call(self, what: str, action: Callable[[], Any]) -> Any:
        """Return what ``action`` returns, after as many attempts as it takes.

        Raises:
            StorageError: it failed for good; the last failure is its cause.
        """
        retrying = tenacity.Retrying(
            stop=self._make_stop(),
            sleep=self._sleep,
            wait=self._wait,
            retry=tenacity.retry_if_exception(_may_pass),
            before_sleep=functools.partial(_tell_of_retry, what),
            reraise=True,
        )
        with explain_errors(what), _undisturbed_random():
            return retrying(action)

    def _make_stop(self) -> Callable[[tenacity.RetryCallState], bool]:
        failures_while_ending = itertools.count(1)
        return lambda state: (
            state.attempt_number >= self.attempts or (self.is_ending() and next(failures_while_ending) > 1)
        )

    def _sleep(self, wait_s: float) -> None:
        since = time.monotonic()
        while (slept := time.monotonic() - since) < wait_s and not (slept > _LAST_WAIT_S and self.is_ending()):
            time.sleep(min(_POLL_S, wait_s - slept))

    def _wait(self, state: tenacity.RetryCallState) -> float:
        longest = min(self.first_wait_s * 2.0 ** (state.attempt_number - 1), self.longest_wait_s)
        return longest * _OWN_RANDOM.uniform(0.5, 1.0)


def _may_pass(error: BaseException) -> bool:
    """Tell whether another attempt may go better."""
    return (
        isinstance(error, Exception)
        and not isinstance(error, _FINAL_ERRORS)
        and not (isinstance(error, OSError) and error.errno in _FINAL_ERRNOS)
        and type(error).__name__ not in _FINAL_NAMES
    )


def _tell_of_retry(what: str, state: tenacity.RetryCallState) -> None:
    error = state.outcome and state.outcome.exception()
    wait_s = state.next_action.sleep if state.next_action is not None else 0.0
    told = mask_text(str(error))
    logger.warning("Failed while %s: %s: %s. Trying again in %.1f s.", what, type(error).__name__, told, wait_s)


@contextlib.contextmanager
def _undisturbed_random() -> Iterator[None]:
    """Undo the draws from Python's generator that libraries make for pauses of their own.

    In another thread that would undo draws of the trial, which trains at the same time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


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
        file = source / name
        place = target / name
        retry.call(f"writing {escape(place)}", functools.partial(place.fs.put_file, str(file), place.path))
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
        UnsafeCheckpointError: a name would lie outside of ``target``, or is that of a file and of a directory.
    """
    names = list(names)
    outside = [name for name in names if not _is_inside(name)]
    if outside:
        raise errors.UnsafeCheckpointError(
            f"{escape(source)} holds files whose names lead out of it: {', '.join(map(repr, outside))}. Nothing was "
            "copied."
        )
    twofold = sorted({parent for name in names for parent in _parents_of(name)} & set(names))
    if twofold:
        raise errors.UnsafeCheckpointError(
            f"{escape(source)} holds files that have the name of a directory there: {', '.join(map(repr, twofold))}. "
            "An object store can hold both, a disk cannot; remove or rename one of them. Nothing was copied."
        )
    for name in names:
        file = target / name
        place = source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        retry.call(f"reading {escape(place)}", functools.partial(place.fs.get_file, place.path, str(file)))
        if progress is not None:
            progress(name, file.stat().st_size)


def _parents_of(name: str) -> Iterator[str]:
    return (parent.as_posix() for parent in pathlib.PurePosixPath(name).parents)


def _is_inside(name: str) -> bool:
    path = pathlib.PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name


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
        StorageError: it cannot be read.
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
