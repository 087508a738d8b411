"""Places on any file system that fsspec knows, and errors that tell what is wrong with one."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from det_lightning import errors
from det_lightning.masking import MASK, cause_without_secrets, is_masked, mask_text, mask_url, secrets_in

# Which extra of det-lightning brings the library for a protocol.
_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "azure"),
}


@dataclasses.dataclass(frozen=True, repr=False)
class Location:
    """A file or directory.

    Attributes:
        fs: the file system.
        path: the place in it.
        origin: what stood before the path in the URL: protocol, and host where the file system has one.
    """

    fs: Any
    path: str
    origin: str = ""

    @classmethod
    def parse(cls, url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Location:
        """Return the place that ``url`` names.

        Args:
            url: a URL, or the path of a local file; ``~`` is the home directory.
            options: what the file system needs to know, such as ``endpoint_url`` or credentials.

        Raises:
            StorageError: no library is known for the URL, or it is not installed; or its password is a mask.
        """
        name = _with_password(os.fspath(url), options or {})
        if "://" not in name or name.startswith("file://"):
            local = pathlib.Path(name.removeprefix("file://")).expanduser()
            return cls(LocalFileSystem(), os.path.abspath(local))  # noqa: PTH100 (keeps links as they are)
        try:
            fs, path = fsspec.core.url_to_fs(name, **(options or {}))
        except Exception as e:  # each file system has errors of its own
            hidden = [*secrets_in(name), *secrets_in(options)]
            explained = mask_text(_explain(mask_url(name), e), hidden)
            shows_none = mask_text(str(e), hidden) == str(e)
            raise errors.StorageError(explained) from (cause_without_secrets(e) if shows_none else None)
        path = path.rstrip("/")
        trimmed = name.rstrip("/")
        return cls(fs, path, trimmed.removesuffix(path) if path and trimmed.endswith(path) else "")

    @property
    def is_local(self) -> bool:
        """Whether it is a path of this machine."""
        return isinstance(self.fs, LocalFileSystem)

    @property
    def local_path(self) -> pathlib.Path:
        """The path, where :attr:`is_local`."""
        return pathlib.Path(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    def __truediv__(self, name: str) -> Location:
        return Location(self.fs, f"{self.path}/{name}", self.origin)

    @property
    def url(self) -> str:
        """The path, or the URL with all that it was given with: a password too."""
        if self.is_local:
            return self.path
        return f"{self.origin}{self.path}" if self.origin else str(self.fs.unstrip_protocol(self.path))

    def __str__(self) -> str:
        """Return the path or URL as it may be shown: without its password."""
        return self.url if self.is_local else mask_text(mask_url(self.url))

    def __repr__(self) -> str:
        return f"Location({str(self)!r})"

    @property
    def is_object_store(self) -> bool:
        """Whether directories need not be made, and several requests at a time are fine (fsspec is async)."""
        return bool(getattr(self.fs, "async_impl", False))

    # What follows sees the place as it is now; some file systems remember listings.

    def exists(self) -> bool:
        """Tell whether there is anything here."""
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self.path))

    def is_dir(self) -> bool:
        """Tell whether this is a directory; on an object store, one that holds anything."""
        self.fs.invalidate_cache()
        return bool(self.fs.isdir(self.path))

    def list_names(self) -> list[str]:
        """Return the names in this directory, those of links left out; none if there is no such directory."""
        return sorted(name for name, info in self._list().items() if not _is_link(info))

    def list_links(self) -> dict[str, str]:
        """Return the names of the links in this directory, and where each leads; empty text if that is not known."""
        return {name: str(info.get("destination") or "") for name, info in self._list().items() if _is_link(info)}

    def link_target(self) -> str | None:
        """Return where this leads if it is a link, or empty text if that is not known; None if it is none."""
        if self.is_local:
            return str(self.local_path.readlink()) if self.local_path.is_symlink() else None
        if self.is_object_store:
            return None
        parent = dataclasses.replace(self, path=self.path.rpartition("/")[0])
        return parent.list_links().get(self.name)

    def resolved(self) -> Location:
        """Return what this leads to if it is a link on this machine, else this."""
        if self.link_target() is None or not self.is_local:
            return self
        parent = self.local_path.parent
        target = self.local_path.resolve()
        # A neighbour is named as this is.
        return dataclasses.replace(
            self, path=str(parent / target.name if target.parent == parent.resolve() else target)
        )

    def _list(self) -> dict[str, Mapping[str, Any]]:
        self.fs.invalidate_cache()
        try:
            entries = self.fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return {}
        # Object stores may list an object that stands for the directory itself.
        found = {entry["name"].rstrip("/"): entry for entry in entries}
        return {path.rpartition("/")[2]: info for path, info in found.items() if path != self.path and path}

    def find_files(self) -> dict[str, dict[str, Any]]:
        """Return what the file system tells of all files below this directory, by their paths from here."""
        self.fs.invalidate_cache()
        prefix = f"{self.path}/"
        found: dict[str, dict[str, Any]] = self.fs.find(self.path, detail=True)
        # A name that ends in a slash is that of an empty object that stands for a directory.
        return {
            path[len(prefix) :]: info
            for path, info in found.items()
            if path.startswith(prefix) and not path.endswith("/")
        }

    def read(self) -> bytes:
        """Return the content of this file."""
        content: bytes = self.fs.cat_file(self.path)
        return content

    def write(self, content: bytes) -> None:
        """Put ``content`` into this file, whole or not at all."""
        if not self.is_local:
            if not self.is_object_store:
                self.fs.makedirs(self.path.rpartition("/")[0], exist_ok=True)
            self.fs.pipe_file(self.path, content)
            return
        target = self.local_path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)  # a link, perhaps
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Remove this file, or this directory with all that is in it, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            if self.is_local or not glob.has_magic(self.path):
                self.fs.rm(self.path, recursive=True)
                return
            # rm() would take the path for a pattern, and remove what it matches.
            for path in self.fs.find(self.path):
                self.fs.rm_file(path)
            if not self.is_object_store:
                for path in [self.path, *sorted(self.fs.find(self.path, withdirs=True))][::-1]:
                    self.fs.rmdir(path)


def _is_link(info: Mapping[str, Any]) -> bool:
    return bool(info.get("islink")) or info.get("type") == "link"


@contextlib.contextmanager
def explain_errors(what: str) -> Iterator[None]:
    """Turn the errors that a file system raises inside into a ``StorageError`` that says what was being done.

    Args:
        what: completes the sentence "The error came while ...".
    """
    try:
        yield
    except (errors.DetLightningError, AssertionError):
        raise
    except PermissionError as e:
        raise errors.StorageError(
            f"Permission denied while {what}: {mask_text(str(e))}. Check the credentials and their rights."
        ) from cause_without_secrets(e)
    except FileNotFoundError as e:
        raise errors.StorageError(
            f"Not found while {what}: {mask_text(str(e))}. Check the bucket or directory."
        ) from cause_without_secrets(e)
    except Exception as e:  # each file system has errors of its own
        raise errors.StorageError(
            f"Failed while {what}: {type(e).__name__}: {mask_text(str(e))}"
        ) from cause_without_secrets(e)


def _with_password(url: str, options: Mapping[str, Any]) -> str:
    """Return a URL that can be opened: where its password is a mask the options have to hold it.

    Raises:
        StorageError: they do not.
    """
    masked = f":{MASK}@"
    if "://" not in url or masked not in url:
        return url
    if options.get("password") is None or is_masked(options["password"]):
        raise errors.StorageError(
            f"The password in {url} is masked: write it into the URL, or give it as the option 'password' (options= of "
            "CheckpointStorage, storage_options=, or --option password=...)."
        )
    return url.replace(masked, "@", 1)


def _explain(shown: str, error: Exception) -> str:
    """Return why the file system of a URL could not be made."""
    if isinstance(error, ImportError):
        extra = _EXTRAS.get(shown.partition("://")[0])
        install = f"pip install 'det-lightning[{extra}]'" if extra else str(error)
        return f"{shown} needs a library that is not installed: {install}"
    if isinstance(error, ValueError):
        return (
            f"{shown!r} cannot be opened: {error}. A storage is a directory, or a URL such as s3://bucket/prefix, "
            "gs://bucket/prefix, az://container/prefix, sftp://host/path."
        )
    return f"{shown} cannot be opened: {type(error).__name__}: {error}"
