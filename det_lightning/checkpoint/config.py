"""Determined's ``checkpoint_storage`` section, as a URL and what its file system needs to know."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["storage_from_config"]

_Settings = tuple[str, dict[str, Any]]

# Entries that say which checkpoints to keep, or that only the platform needs.
_NOT_FOR_STORAGE = {
    "type",
    "propagation",
    "save_experiment_best",
    "save_trial_best",
    "save_trial_latest",
    "tensorboard_path",
}


def storage_from_config(config: Mapping[str, Any]) -> _Settings:
    """Return the URL of the storage that ``config`` describes, and the options of its file system.

    The layout below that URL is Determined's: one directory for each checkpoint, named by its id.

    Args:
        config: the ``checkpoint_storage`` section of an experiment configuration: ``type`` is ``shared_fs``,
            ``directory``, ``s3``, ``gcs`` or ``azure``.

    Raises:
        ValueError: the type is unknown, an entry is missing or unknown, or a path lies outside of its parent; all that
            is wrong is named.
    """
    kind = config.get("type")
    if kind not in _TYPES:
        raise ValueError(f"checkpoint_storage: type must be one of {', '.join(_TYPES)}; got {kind!r}.")
    required, optional, build = _TYPES[kind]
    given = {name: value for name, value in config.items() if name not in _NOT_FOR_STORAGE and value is not None}
    mistakes = [f"{name} is missing" for name in required if name not in given]
    mistakes += [
        f"{name}={value!r} is not known" for name, value in given.items() if name not in (*required, *optional)
    ]
    mistakes += [
        f"{name} must be a string; got {value!r}"
        for name, value in given.items()
        if name in (*required, *optional) and not isinstance(value, str | os.PathLike)
    ]
    if mistakes:
        raise ValueError(
            f"checkpoint_storage of type {kind}: {'; '.join(mistakes)}. It takes {', '.join(required)}"
            + (f", and optionally {', '.join(optional)}." if optional else ".")
        )
    return build(given)


def _shared_fs(given: dict[str, Any]) -> _Settings:
    host_path = pathlib.PurePosixPath(given["host_path"])
    storage_path = given.get("storage_path") or given.get("checkpoint_path")
    if not storage_path:
        return str(host_path), {}
    # Joined with an absolute path, the host path is dropped.
    inside = pathlib.PurePosixPath(os.path.normpath(host_path / storage_path))
    if not inside.is_relative_to(os.path.normpath(host_path)):
        raise ValueError(
            f"checkpoint_storage of type shared_fs: storage_path must lie under host_path {str(host_path)!r}; got "
            f"{str(storage_path)!r}."
        )
    return str(inside), {}


def _directory(given: dict[str, Any]) -> _Settings:
    return str(given["container_path"]), {}


def _s3(given: dict[str, Any]) -> _Settings:
    names = {"access_key": "key", "secret_key": "secret", "session_token": "token", "endpoint_url": "endpoint_url"}
    return _url("s3", given["bucket"], given.get("prefix")), _renamed(given, names)


def _gcs(given: dict[str, Any]) -> _Settings:
    return _url("gs", given["bucket"], given.get("prefix")), {}


def _azure(given: dict[str, Any]) -> _Settings:
    names = {"connection_string": "connection_string", "account_url": "account_host", "credential": "credential"}
    options = _renamed(given, names)
    if "account_host" in options:
        host = options["account_host"].partition("://")[2] or options["account_host"]
        options |= {"account_host": host.rstrip("/"), "account_name": host.partition(".")[0]}
    return _url("az", given["container"], None), options


def _url(protocol: str, bucket: str, prefix: str | None) -> str:
    parts = [part for part in (prefix or "").split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"checkpoint_storage: prefix must not contain '..'; got {prefix!r}.")
    return "/".join([f"{protocol}://{bucket.strip('/')}", *parts])


def _renamed(given: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {option: given[name] for name, option in names.items() if name in given}


_TYPES: dict[Any, tuple[tuple[str, ...], tuple[str, ...], Callable[[dict[str, Any]], _Settings]]] = {
    "shared_fs": (("host_path",), ("storage_path", "checkpoint_path", "container_path"), _shared_fs),
    "directory": (("container_path",), (), _directory),
    "s3": (("bucket",), ("prefix", "endpoint_url", "access_key", "secret_key", "session_token"), _s3),
    "gcs": (("bucket",), ("prefix",), _gcs),
    "azure": (("container",), ("connection_string", "account_url", "credential"), _azure),
}
