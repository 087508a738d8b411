"""Files and directories on any file system that fsspec supports: errors that explain failures, and copies.

Change here: ``upload`` copies the files of a checkpoint one by one, in the order of
``det_lightning/checkpoint/storage/staging.py``, in which ``metadata.json`` is last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import glob
import os
import pathlib
import random
import re
import stat
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from det_lightning import errors
from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR
from det_lightning.checkpoint.storage.storage_config import EXTRAS
from det_lightning.escaping import escape
from det_lightning.files.local_files import write_whole
from det_lightning.files.strict_json import MAX_SMALL_FILE_BYTES
from det_lightning.masking import (
    MASK,
    cause_without_secrets,
    find_option_secrets,
    is_masked,
    mask_text,
    mask_url,
    short_text,
)
from det_lightning.missing_parts import how_to_install


@dataclasses.dataclass(frozen=True, repr=False)
class Location:
    """A file or directory: a path in a file system of fsspec, perhaps on this machine.

    ``origin`` is the part of the URL before the path: the protocol, and the host if the file system has one.
    """

    fs: Any
    path: str
    origin: str = ""
    is_local: bool = False

    @classmethod
    def parse(cls, url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Location:
        """Return the location of a URL or local path; ``~`` is the home directory."""
        name = _with_password(os.fspath(url), options or {})
        if "://" not in name or name.startswith("file://"):
            local = pathlib.Path(name.removeprefix("file://")).expanduser()
            return cls(LocalFileSystem(), os.path.abspath(local), is_local=True)  # noqa: PTH100 (keeps links)
        try:
            fs, path = fsspec.core.url_to_fs(name, **(options or {}))
        except Exception as e:  # each file system has errors of its own
            hidden = find_option_secrets([name, options])
            explained = mask_text(_explain(mask_url(name), e), hidden)
            raise errors.StorageError(explained) from cause_without_secrets(e, hidden)
        path = path.rstrip("/")
        trimmed = name.rstrip("/")
        origin = trimmed.removesuffix(path) if path and trimmed.endswith(path) else ""
        return cls(fs, path, origin, isinstance(fs, LocalFileSystem))

    @property
    def local_path(self) -> pathlib.Path:
        """The path, if :attr:`is_local`."""
        return pathlib.Path(self.path)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        return dataclasses.replace(self, path=self.path.rpartition("/")[0])

    def __truediv__(self, name: str) -> Location:
        return Location(self.fs, f"{self.path}/{name}", self.origin, self.is_local)

    @property
    def url(self) -> str:
        """The path, or the URL as given, including a password."""
        if self.is_local:
            return self.path
        return f"{self.origin}{self.path}" if self.origin else str(self.fs.unstrip_protocol(self.path))

    def __str__(self) -> str:
        """Return the path or URL for messages, without the password."""
        return self.path if self.is_local else mask_text(mask_url(self.url))

    def __repr__(self) -> str:
        return f"Location({str(self)!r})"

    @property
    def is_object_store(self) -> bool:
        """Whether this is an object store: directories need not be created, and requests may be concurrent."""
        return bool(getattr(self.fs, "async_impl", False))

    # Names from files and listings may be anything: only the following two methods make paths from them.

    def checkpoint(self, checkpoint_id: str) -> Location:
        """Return the directory of the checkpoint with this id in this storage, whether existing or not."""
        if not is_name(checkpoint_id):
            raise errors.CheckpointNotFound(
                f"There is no checkpoint {checkpoint_id!r}: an id is the name of a directory in {self}."
            )
        return self / checkpoint_id

    def bookkeeping(self, kind: str, *names: str) -> Location:
        """Return a file or directory of this storage's bookkeeping, which is beside the checkpoints."""
        location = self
        for name in (BOOKKEEPING_DIR, kind, *names):
            if name in names and not is_name(name):
                raise errors.StorageError(f"{name!r} cannot be the name of a file in {location}.")
            location = location / name
            if (target := location.link_target()) is not None:
                raise errors.StorageError(
                    f"{location} is a link{f' to {target}' if target else ''}, and nothing is written "
                    "or deleted through a link. Replace the link by its target, or remove the link."
                )
        return location

    # The following methods see the current state; some file systems cache listings.

    def exists(self) -> bool:
        """Return whether there is anything here."""
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self.path))

    def is_dir(self) -> bool:
        """Return whether this is a directory; on an object store, a directory with any content."""
        self.fs.invalidate_cache()
        return bool(self.fs.isdir(self.path))

    def list_names(self) -> list[str]:
        """Return the names in this directory, except links; none if there is no such directory."""
        return sorted(self.list_types())

    def list_files(self) -> set[str]:
        """Return the names of the files in this directory, links to files included."""
        if self.is_local:
            return {entry.name for entry in _scan(self.path) if not entry.is_dir()}
        return {name for name, info in self._list().items() if info.get("type") != "directory"}

    def list_types(self) -> dict[str, str]:
        """Return ``file``, ``directory`` or another type for each name in this directory except links."""
        return {name: str(info.get("type")) for name, info in self._list().items() if not _is_link(info)}

    def modified_s(self) -> float | None:
        """Return when this file was modified, in seconds since 1970; None if it is gone or the time is unknown."""
        try:
            return find_time(self.fs.info(self.path))
        except FileNotFoundError:
            return None

    def list_links(self) -> dict[str, str]:
        """Return the names and targets of the links in this directory; an unknown target is an empty string."""
        return {name: str(info.get("destination") or "") for name, info in self._list().items() if _is_link(info)}

    def link_target(self) -> str | None:
        """Return the target of a link, an empty string if unknown; None if this is not a link."""
        if self.is_local:
            return os.readlink(self.path) if os.path.islink(self.path) else None  # noqa: PTH114, PTH115 (of a string)
        if self.is_object_store:
            return None
        with explain_errors("looking for links in", self.parent):
            return self.parent.list_links().get(self.name)

    def resolve_link(self) -> Location:
        """Return the target if this is a link on this machine, otherwise this location."""
        if not self.is_local or self.link_target() is None:
            return self
        parent = self.local_path.parent
        target = self.local_path.resolve()
        # If the target is in the same directory, its path keeps the links above it.
        beside = target.parent == parent.resolve()
        return dataclasses.replace(self, path=str(parent / target.name if beside else target))

    def _list(self) -> dict[str, Mapping[str, Any]]:
        if self.is_local:  # listings of thousands of checkpoints take a tenth of fsspec's time
            return {entry.name: _describe_entry(entry) for entry in _scan(self.path)}
        self.fs.invalidate_cache()
        try:
            entries = self.fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return {}
        # Object stores may list an object that stands for the directory itself.
        found = {entry["name"].rstrip("/"): entry for entry in entries}
        return {path.rpartition("/")[2]: info for path, info in found.items() if path != self.path and path}

    def find_files(self) -> dict[str, Mapping[str, Any]]:
        """Return the file system's facts about all files below this directory, by relative path.

        On this machine, a link to a directory counts as a file.
        """
        if self.is_local:
            return dict(_find_local_files(self.path, ""))
        self.fs.invalidate_cache()
        prefix = f"{self.path}/"
        found: dict[str, dict[str, Any]] = self.fs.find(self.path, detail=True)
        # A name that ends in a slash belongs to an empty object that stands for a directory.
        return {
            path[len(prefix) :]: info
            for path, info in found.items()
            if path.startswith(prefix) and not path.endswith("/")
        }

    def read(self, limit: int = MAX_SMALL_FILE_BYTES) -> bytes:
        """Return the content; raise a ValueError for a local path that is neither a file nor a directory.

        Raise a ValueError if there are more than ``limit`` bytes, of which at most one more is read.
        """
        if self.is_local:
            content = self._read_local(limit)
        else:
            try:
                content = self.fs.cat_file(self.path, end=limit + 1)
            except Exception as e:
                # Servers refuse a range of an empty object.
                if isinstance(e, FileNotFoundError) or self.fs.size(self.path) != 0:
                    raise
                return b""
        if len(content) > limit:
            size = max(self.fs.size(self.path) or 0, len(content))
            raise ValueError(f"{escape(self.path)} has {size:,} bytes; at most {limit:,} are read")
        return content

    def _read_local(self, limit: int) -> bytes:
        # Reading a pipe would wait for a writer, and a device may have no end.
        if not (stat.S_ISREG(mode := os.stat(self.path).st_mode) or stat.S_ISDIR(mode)):  # noqa: PTH116 (of a string)
            raise ValueError(f"{escape(self.path)} is not a file")
        with open(self.path, "rb") as file:  # noqa: PTH123 (of a string)
            return file.read(limit + 1)

    def write(self, content: bytes) -> None:
        """Write ``content`` to this file; a file that is there is replaced completely or not at all."""
        if self.is_local:
            write_whole(self.local_path, content, sync=True)
            return
        if not self.is_object_store:
            self.fs.makedirs(self.parent.path, exist_ok=True)
        if self.is_object_store or not self.exists():
            self.fs.pipe_file(self.path, content)
            return
        new = f"{self.path}.new"  # a kill would tear a file that is written over
        self.fs.pipe_file(new, content)
        self.fs.mv(new, self.path)

    def remove(self) -> None:
        """Remove this file, or this directory with all content, if existing."""
        with contextlib.suppress(FileNotFoundError):
            if self.is_local or not glob.has_magic(self.path):
                self.fs.rm(self.path, recursive=True)
                return
            # rm() would treat the path as a pattern, and remove what it matches.
            for path in self.fs.find(self.path):
                self.fs.rm_file(path)
            if not self.is_object_store:
                for path in [self.path, *sorted(self.fs.find(self.path, withdirs=True))][::-1]:
                    self.fs.rmdir(path)


def find_time(entry: Mapping[str, Any]) -> float | None:
    """Return when a file was modified, by a file system's facts; each has a name and a type of the entry."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = entry.get(key)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


def _scan(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _describe_entry(entry: os.DirEntry[str]) -> dict[str, Any]:
    kind = "directory" if entry.is_dir() else "file" if entry.is_file() else "other"
    if entry.is_symlink():
        return {"type": kind, "islink": True, "destination": os.readlink(entry.path)}  # noqa: PTH115 (of a string)
    return {"type": kind}


def _find_local_files(path: str, prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for entry in _scan(path):
        if entry.is_dir(follow_symlinks=False):
            yield from _find_local_files(entry.path, f"{prefix}{entry.name}/")
            continue
        try:
            found = entry.stat()
        except OSError:  # a link without a target, or a file that has just gone
            continue
        yield f"{prefix}{entry.name}", {"size": found.st_size, "mtime": found.st_mtime}


def _is_link(info: Mapping[str, Any]) -> bool:
    return bool(info.get("islink")) or info.get("type") == "link"


@contextlib.contextmanager
def explain_errors(action: str, where: object = "") -> Iterator[None]:
    """Raise a file system's errors in the block as a ``StorageError`` that names ``action`` and ``where``.

    Python's random generator belongs to the trial: libraries of remote file systems, which draw the pauses between
    their attempts from it, must not change the training.
    """
    # In another thread, restoring the generator would undo draws of the trial, which trains at the same time.
    is_guarded = isinstance(where, Location) and not where.is_local
    is_guarded = is_guarded and threading.current_thread() is threading.main_thread()
    before = random.getstate() if is_guarded else None
    try:
        yield
    except (errors.DetLightningError, AssertionError):
        raise
    except Exception as e:  # each file system has errors of its own
        secrets = find_option_secrets(where.fs.storage_options) if isinstance(where, Location) else []
        message = f"Failed while {f'{action} {where}'.strip()}: {type(e).__name__}: {mask_text(str(e), secrets)}"
        raise errors.StorageError(message) from cause_without_secrets(e, secrets)
    finally:
        if before is not None:
            random.setstate(before)


def _with_password(url: str, options: Mapping[str, Any]) -> str:
    """Return a URL that can be opened: a masked password is left out if the options hold the password."""
    masked = f":{MASK}@"
    if "://" not in url or masked not in url:
        return url
    if options.get("password") is None or is_masked(options["password"]):
        raise errors.StorageError(
            f"The password in {url} is masked: write the password into the URL, or pass the option 'password' "
            "(options= of CheckpointStorage, storage_options=, or --option password=...)."
        )
    return url.replace(masked, "@", 1)


def _explain(shown: str, error: Exception) -> str:
    if isinstance(error, ImportError):
        extra = EXTRAS.get(shown.partition("://")[0])
        install = how_to_install(extra) if extra else str(error)
        return f"{shown} needs a library that is not installed: {install}"
    if isinstance(error, ValueError):
        return (
            f"{shown!r} cannot be opened: {error}. A storage is a directory, or a URL such as s3://bucket/prefix, "
            "gs://bucket/prefix, az://container/prefix, sftp://host/path."
        )
    return f"{shown} cannot be opened: {type(error).__name__}: {error}"


_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def new_id() -> str:
    """Return the id of a new checkpoint."""
    return str(uuid.uuid4())


def is_name(name: str) -> bool:
    """Return whether a checkpoint's directory may have this name, which must not lead out of the storage."""
    return name not in ("", ".", "..") and name.casefold() != BOOKKEEPING_DIR and not {"/", "\\", "\0"} & set(name)


def require_checkpoint_path(value: Any) -> None:
    """Raise a TypeError unless a value can name a checkpoint."""
    if not (isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str)):
        raise TypeError(f"A checkpoint must be named by its id, path or URL; got {short_text(value)}.")


def is_own_id(name: str) -> bool:
    """Return whether :func:`new_id` made this id; a name given by Lightning may stand in front."""
    before = name[:-36]
    return _UUID.fullmatch(name[-36:]) is not None and (not before or before.endswith("-")) and is_name(name)


# Copies of files to and from a storage

Progress = Callable[[str, int], None]


def upload(source: pathlib.Path, names: Iterable[str], target: Location) -> None:
    """Copy files of a local directory to ``target``."""
    for name in names:
        remote = target / name
        with explain_errors("writing", remote):
            remote.fs.put_file(str(source / name), remote.path)


def download(source: Location, names: Iterable[str], target: pathlib.Path, progress: Progress | None = None) -> None:
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
    if ambiguous := sorted(parents & set(names)):
        raise errors.UnsafeCheckpointError(
            f"{source} holds files with the names of directories: {', '.join(map(repr, ambiguous))}. An object store "
            "can hold both, a disk cannot: remove or rename the files. Nothing was copied."
        )
    for name in names:
        local = target / name
        remote = source / name
        with explain_errors("reading", remote):
            _download_one(remote, local, name.endswith("/"))
        if progress is not None:
            progress(name, local.stat().st_size)


def _download_one(remote: Location, local: pathlib.Path, is_directory: bool) -> None:
    (local if is_directory else local.parent).mkdir(parents=True, exist_ok=True)
    if not is_directory:
        remote.fs.get_file(remote.path, str(local))


def _is_inside(name: str) -> bool:
    path = pathlib.PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name
