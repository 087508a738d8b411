"""The types of ``checkpoint_storage``, with entries and protocols: the only list of types, which others read."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class StorageType:
    """A type of storage. Without protocols it is a directory; otherwise the extra of the same name has its library.

    Args:
        description: a sentence for the reference of the configuration.
        required: entries of the section that must be given.
        optional: entries that may be given.
        alternatives: optional entries of which at most one may be given.
        protocols: protocols of its URLs, of which a URL made from a section has the first.
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
