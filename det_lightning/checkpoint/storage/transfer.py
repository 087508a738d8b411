"""Copying files to and from a storage, with retries, and opening any storage's checkpoint as a local directory."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import pathlib
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, TypeVar

from det_lightning import errors
from det_lightning.checkpoint.format.layout import CODE_DIR, METADATA_FILE
from det_lightning.checkpoint.storage.checkpoint_info import require_checkpoint
from det_lightning.checkpoint.storage.location import (
    Location,
    explain_errors,
    find_secrets_of,
    is_name,
    new_id,
    require_checkpoint_path,
)
from det_lightning.escaping import get_logger
from det_lightning.masking import mask_text

logger = get_logger(__name__)

# How often a pausing transfer checks whether the run is ending, and its longest pause in that case.
_POLL_S = 0.1
_LAST_WAIT_S = 1.0

# Errors after which another attempt would not help.
_FINAL_ERRORS = (
    PermissionError,
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,
    TypeError,
)
_FINAL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG)
_FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError")  # of botocore, which need not be installed

# The global generator belongs to the trial: a retried transfer must not change the training.
_OWN_RANDOM = random.Random()

Progress = Callable[[str, int], None]
_Result = TypeVar("_Result")


def _never() -> bool:
    return False


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """How many times a transfer is attempted, and with which pauses.

    Attributes:
        attempts: number of attempts at each file.
        first_wait_s: pause after the first failure, in seconds; each further pause is twice as long, with some jitter.
        longest_wait_s: longest pause.
        is_ending: returns whether the process was asked to end. A failing transfer is then tried once more, after at
            most a second.

    Example:
        >>> from det_lightning.checkpoint import CheckpointStorage, RetryPolicy
        >>> storage = CheckpointStorage("checkpoints", retry=RetryPolicy(attempts=3, longest_wait_s=5))
    """

    attempts: int = 6
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0
    is_ending: Callable[[], bool] = dataclasses.field(default=_never, repr=False, compare=False)

    def call(self, what: str, action: Callable[[], _Result], *, where: object = "") -> _Result:
        """Return the result of ``action``, retrying as necessary; messages name ``what`` and ``where``.

        Raise a ``StorageError`` after the final failure, with this failure as the cause.
        """
        # Libraries draw from Python's generator for their own pauses. In another thread, restoring it would undo draws
        # of the trial, which trains at the same time.
        in_main_thread = threading.current_thread() is threading.main_thread()
        before = random.getstate() if in_main_thread else None
        try:
            with explain_errors(what, where):
                return self._retry(what, action, where)
        finally:
            if before is not None:
                random.setstate(before)

    def _retry(self, what: str, action: Callable[[], _Result], where: object) -> _Result:
        attempt = failures_while_ending = 0
        while True:
            attempt += 1
            try:
                return action()
            except RecursionError as e:  # fsspec and pathlib call themselves for each part of a name
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG)) from e
            except Exception as e:
                failures_while_ending += self.is_ending()
                if not _may_pass(e) or attempt >= self.attempts or failures_while_ending > 1:
                    raise
                longest = min(self.first_wait_s * 2.0 ** (attempt - 1), self.longest_wait_s)
                wait_s = longest * _OWN_RANDOM.uniform(0.5, 1.0)
                logger.warning(
                    "Failed while %s %s: %s: %s. Trying again in %.1f s.",
                    *(what, where, type(e).__name__, mask_text(str(e), find_secrets_of(where)), wait_s),
                )
            self._sleep(wait_s)

    def _sleep(self, wait_s: float) -> None:
        since = time.monotonic()
        while (slept := time.monotonic() - since) < wait_s and not (slept > _LAST_WAIT_S and self.is_ending()):
            time.sleep(min(_POLL_S, wait_s - slept))


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, errors.CheckpointError):  # explained already; one without a cause is a decision
        return error.__cause__ is not None and _may_pass(error.__cause__)
    return (
        not isinstance(error, _FINAL_ERRORS)
        and not (isinstance(error, OSError) and error.errno in _FINAL_ERRNOS)
        and type(error).__name__ not in _FINAL_NAMES
    )


def require_writable(root: Location, retry: RetryPolicy) -> None:
    """Write a file to a storage and remove the file; raise a ``StorageError`` with the reason if that fails."""
    content = b"to see whether it can be written"
    if not root.is_local:
        name = f"probe-{new_id()}"
        probe = retry.call("trying to write to", lambda: root.bookkeeping(name), where=root)
        retry.call("trying to write", lambda: probe.write(content), where=probe)
        retry.call("removing", probe.remove, where=probe)
        return
    directory = root.local_path
    if directory.exists() and not directory.is_dir():
        raise errors.StorageError(
            f"{root} is a file, and no checkpoints can be written to it: a storage is a directory, or a "
            "URL such as s3://bucket/prefix."
        )
    with explain_errors("trying to write to", root):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(content)


@dataclasses.dataclass(frozen=True)
class StoredFiles:
    """Files that a checkpoint in the storage holds as well, if still existing: ``names`` below ``directory``."""

    directory: Location
    names: Set[str]


def upload(
    source: pathlib.Path,
    names: Iterable[str],
    target: Location,
    retry: RetryPolicy,
    unchanged: StoredFiles | None = None,
) -> None:
    """Copy files of a local directory to ``target``; an object store copies ``unchanged`` files within the store."""
    stored: Set[str] = frozenset()
    if unchanged is not None and unchanged.names and target.is_object_store:
        stored = (
            unchanged.names & retry.call("reading", unchanged.directory.find_files, where=unchanged.directory).keys()
        )
    for name in names:
        remote = target / name
        if unchanged is None or name not in stored or not _copy_within(unchanged.directory / name, remote):
            retry.call("writing", functools.partial(remote.fs.put_file, str(source / name), remote.path), where=remote)


def _copy_within(original: Location, copy: Location) -> bool:
    """Copy a file within an object store; return False if the store cannot, or the original is gone."""
    try:
        copy.fs.cp_file(original.path, copy.path)
    except Exception as e:  # whatever the library of a store raises; the file is uploaded
        logger.debug("%s is uploaded, because the store did not copy it: %s", copy, e)
        return False
    return True


def download(
    source: Location, names: Iterable[str], target: pathlib.Path, retry: RetryPolicy, progress: Progress | None = None
) -> None:
    """Copy files to a local directory; call ``progress`` with the name and size of each copied file.

    A name that ends in a slash stands for a directory to create.
    """
    names = list(names)
    outside = [name for name in names if not _is_inside(name)]
    if outside:
        raise errors.UnsafeCheckpointError(
            f"{source} holds files whose names lead out of the checkpoint: {', '.join(map(repr, outside))}. "
            "Nothing was copied."
        )
    parents = {parent.as_posix() for name in names for parent in pathlib.PurePosixPath(name).parents}
    ambiguous = sorted(parents & set(names))
    if ambiguous:
        raise errors.UnsafeCheckpointError(
            f"{source} holds files with the names of directories: {', '.join(map(repr, ambiguous))}. An object "
            "store can hold both, a disk cannot: remove or rename the files. Nothing was copied."
        )
    for name in names:
        local = target / name
        remote = source / name
        retry.call("reading", functools.partial(_download_one, remote, local, name.endswith("/")), where=remote)
        if progress is not None:
            progress(name, local.stat().st_size)


def _download_one(remote: Location, local: pathlib.Path, is_directory: bool) -> None:
    (local if is_directory else local.parent).mkdir(parents=True, exist_ok=True)
    if not is_directory:
        remote.fs.get_file(remote.path, str(local))


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
    """Yield a checkpoint as a local directory; a remote checkpoint is downloaded for the time of the ``with`` block.

    Args:
        url: path or URL of the checkpoint's directory.
        options: see ``CheckpointStorage``.
        with_code: download ``code/`` too.
        retry: how many times a transfer is attempted.
        progress: called with the name and the size in bytes of each downloaded file.

    Raises:
        CheckpointNotFound: there is no such directory.
        StorageError: the directory cannot be read.
        UnsafeCheckpointError: file names lead out of the directory, or a name is both a file's and a directory's.

    Example:
        >>> from det_lightning.checkpoint import CheckpointContent, CheckpointStorage
        >>> from det_lightning.checkpoint import TrialState, open_checkpoint
        >>> storage = CheckpointStorage("checkpoints")
        >>> _ = storage.write(CheckpointContent({}, TrialState(batches_trained=100)))
        >>> with open_checkpoint(storage.newest()) as directory:
        ...     sorted(path.name for path in directory.glob("*.json"))
        ['load_data.json', 'metadata.json']
    """
    if not isinstance(url, str | os.PathLike):
        require_checkpoint_path(url)
    location = Location.parse(url, options)
    if location.is_local:
        if not location.local_path.is_dir():
            raise errors.CheckpointNotFound(f"There is no checkpoint directory {location}.")
        is_complete = (location.local_path / METADATA_FILE).exists()
        if not is_complete:
            require_checkpoint(location)
        # Resuming from a link means resuming from its target.
        with _explain_vanishing(location, is_complete):
            yield location.resolve_link().local_path
        return
    if not is_name(location.name):
        raise errors.CheckpointNotFound(f"{location.name!r} in {location} cannot be the name of a checkpoint.")
    retry = retry or RetryPolicy()
    retry.call("looking into", functools.partial(require_checkpoint, location), where=location)
    files = retry.call("reading", location.find_files, where=location)
    names = [name for name in files if with_code or not name.startswith(f"{CODE_DIR}/")]
    if not names:
        raise errors.CheckpointNotFound(f"There is no checkpoint directory {location}.")
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as folder:
        directory = pathlib.Path(folder) / location.name
        directory.mkdir()
        with _explain_vanishing(location, METADATA_FILE in files):
            download(location, names, directory, retry, progress)
        yield directory


@contextlib.contextmanager
def _explain_vanishing(checkpoint: Location, is_complete: bool) -> Iterator[None]:
    """Say of an error in reading a checkpoint that it was deleted meanwhile, if it was."""
    try:
        yield
    except (errors.CheckpointError, OSError) as e:
        # The metadata go first.
        if (checkpoint / METADATA_FILE).exists() if is_complete else checkpoint.is_dir():
            raise
        raise errors.CheckpointNotFound(
            f"Checkpoint {checkpoint} was deleted while it was read, by the retention of a run or by hand. Use another "
            "checkpoint."
        ) from e
