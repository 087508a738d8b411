"""Turns a ``checkpoint_storage`` section into a URL and options of a file system.

Change here: a new type is an entry of ``STORAGE_TYPES``, and an extra of its name in ``pyproject.toml``; the
configuration's model and the advice to install a library follow. ``det_lightning/masking.py`` names the secret fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from det_lightning.masking import CREDENTIALS, is_masked, short_text

# Entries about which checkpoints to keep, and those that only the platform needs.
_NOT_FOR_STORAGE = {"type", "propagation", "save_experiment_best", "save_trial_best", "save_trial_latest"}

# Earlier names of storage_path in shared_fs.
_OLD_NAMES = {"tensorboard_path", "checkpoint_path"}

# For each entry the file system's option, and the environment variable for a value that is masked in the section.
_OPTIONS: dict[str, tuple[str, str | None]] = {
    "access_key": ("key", "AWS_ACCESS_KEY_ID"),
    "secret_key": ("secret", "AWS_SECRET_ACCESS_KEY"),
    "session_token": ("token", "AWS_SESSION_TOKEN"),
    "endpoint_url": ("endpoint_url", "AWS_ENDPOINT_URL"),
    "connection_string": ("connection_string", "AZURE_STORAGE_CONNECTION_STRING"),
    "credential": ("credential", "AZURE_STORAGE_ACCOUNT_KEY"),
    "account_url": ("account_host", None),
}


def storage_from_config(
    config: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the URL of the storage of a ``checkpoint_storage`` section, and the options of the file system.

    ``options`` take precedence over the section. A secret that is masked in the section comes from the options, or from
    the environment variable that the file system reads. Raise a ``ValueError`` that names all wrong, missing or unknown
    entries, but no value that may be a secret.
    """
    kind = config.get("type")
    if not isinstance(kind, str) or kind not in STORAGE_TYPES:
        raise ValueError(f"checkpoint_storage: type must be one of {', '.join(STORAGE_TYPES)}; got {short_text(kind)}.")
    required = STORAGE_TYPES[kind].required
    optional = STORAGE_TYPES[kind].optional
    known = [*required, *optional]
    ignored = _NOT_FOR_STORAGE if kind == "shared_fs" else _NOT_FOR_STORAGE | _OLD_NAMES
    given = {name: value for name, value in config.items() if name not in ignored and value is not None}
    mistakes = [f"{name} is missing" for name in required if name not in given]
    given, masked = _fill_in_masked(given, options or {})
    mistakes += masked
    mistakes += [_unknown(name, known) for name in given if name not in known]
    mistakes += [
        f"{name} must be a string; got {_shown(name, value)}"
        for name, value in given.items()
        if name in known and not isinstance(value, str | os.PathLike)
    ]
    mistakes += [f"{name} must not be empty" for name in required if given.get(name) == ""]
    mistakes += _wrong_paths({name: value for name, value in given.items() if isinstance(value, str | os.PathLike)})
    if mistakes:
        raise ValueError(
            f"checkpoint_storage of type {kind}: {'; '.join(mistakes)}. It takes {', '.join(required)}"
            + (f", and optionally {', '.join(optional)}." if optional else ".")
        )
    url, built = _url_and_options(kind, given)
    return url, {**built, **(options or {})}


def _fill_in_masked(given: dict[str, Any], options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fill in masked values from elsewhere; also return a sentence for each that cannot be found."""
    kept = {name: value for name, value in given.items() if not is_masked(value)}
    missing = []
    for name in [name for name in given if name not in kept]:
        option, variable = _OPTIONS.get(name, ("", None))
        if variable is None:
            missing.append(f"{name} is masked: pass the section with the value")
        elif option in options:
            continue
        elif os.environ.get(variable):
            kept[name] = os.environ[variable]
        else:
            missing.append(f"{name} is masked: pass the option {option!r}, or set {variable}")
    return kept, missing


def _unknown(name: str, known: list[str]) -> str:
    # Without its value, which may be a secret under a mistyped name.
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"{name} is unknown" + (f" (did you mean {near[0]}?)" if near else "")


def _shown(name: str, value: Any) -> str:
    return f"a value of type {type(value).__name__}" if name in CREDENTIALS else short_text(value)


def _wrong_paths(given: dict[str, Any]) -> list[str]:
    wrong = []
    if ".." in os.fspath(given.get("prefix", "")).split("/"):
        wrong.append(f"prefix must not contain '..'; got {short_text(given['prefix'])}")
    if given.get("host_path"):
        host_path = str(given["host_path"])
        if not pathlib.PurePosixPath(host_path).is_absolute():
            wrong.append(f"host_path must be absolute; got {host_path!r}")
        elif not _inside_host_path(given).is_relative_to(os.path.normpath(host_path)):
            wrong.append(f"storage_path must lie under host_path {host_path!r}; got {str(_storage_path(given))!r}")
    return wrong


def _storage_path(given: dict[str, Any]) -> str | os.PathLike[str]:
    # In Determined's order.
    names = ("storage_path", "tensorboard_path", "checkpoint_path")
    return next((given[name] for name in names if name in given), "")


def _inside_host_path(given: dict[str, Any]) -> pathlib.PurePosixPath:
    # Joining with an absolute path drops the host path.
    return pathlib.PurePosixPath(os.path.normpath(pathlib.PurePosixPath(given["host_path"]) / _storage_path(given)))


def _url_and_options(kind: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    options = {option: given[name] for name, (option, _) in _OPTIONS.items() if name in given}
    if "account_host" in options:
        host = options["account_host"].partition("://")[2] or options["account_host"]
        options |= {"account_host": host.rstrip("/"), "account_name": host.partition(".")[0]}
    place = given[STORAGE_TYPES[kind].required[0]]
    if kind in LOCAL_TYPES:
        return str(_inside_host_path(given) if kind == "shared_fs" else place), options
    parts = [part for part in os.fspath(given.get("prefix", "")).split("/") if part not in ("", ".")]
    protocol = STORAGE_TYPES[kind].protocols[0]
    return "/".join([f"{protocol}://{os.fspath(place).strip('/')}", *parts]), options


@dataclasses.dataclass(frozen=True)
class StorageType:
    """A type of storage: a directory, or with protocols a remote storage, whose library is the extra of its name.

    Args:
        description: a sentence for the reference of the configuration.
        required: entries of the section that must be given.
        optional: entries that may be given.
        alternatives: optional entries, at most one of which may be given.
        protocols: protocols of URLs; a URL made from a section has the first.
    """

    description: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()


STORAGE_TYPES = {
    "shared_fs": StorageType(
        "A directory that all machines can access.",
        required=("host_path",),
        optional=("storage_path", "container_path", "checkpoint_path", "tensorboard_path", "propagation"),
    ),
    "directory": StorageType("A directory inside containers.", required=("container_path",)),
    "s3": StorageType(
        "An S3 bucket.",
        required=("bucket",),
        optional=("prefix", "endpoint_url", "access_key", "secret_key", "session_token"),
        protocols=("s3", "s3a"),
    ),
    "gcs": StorageType(
        "A Google Cloud Storage bucket.", required=("bucket",), optional=("prefix",), protocols=("gs", "gcs")
    ),
    "azure": StorageType(
        "An Azure Blob Storage container.",
        required=("container",),
        optional=("connection_string", "account_url", "credential"),
        alternatives=("connection_string", "account_url"),
        protocols=("az", "abfs", "abfss", "adl"),
    ),
}
#: The types that are directories.
LOCAL_TYPES = [name for name, kind in STORAGE_TYPES.items() if not kind.protocols]
#: The extra of det-lightning that installs the library for a protocol.
EXTRAS = {protocol: name for name, kind in STORAGE_TYPES.items() for protocol in kind.protocols}
