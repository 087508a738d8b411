"""The ``checkpoint_storage`` section: where checkpoints are stored, and which are kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, SerializeAsAny, model_validator

from det_lightning.checkpoint.storage.storage_config import storage_from_config
from det_lightning.config.section import Count, Section, read_variant, refuse, variants


class StorageConfig(Section):
    """Which checkpoints to keep after an experiment; without a type, they are stored in the experiment's directory."""

    type: str | None = None
    save_experiment_best: Count = 0
    save_trial_best: Count = 1
    save_trial_latest: Count = 1

    def location(self) -> dict[str, Any]:
        return self.model_dump(
            exclude_none=True, exclude={"save_experiment_best", "save_trial_best", "save_trial_latest"}
        )

    @model_validator(mode="after")
    def _can_be_used(self) -> StorageConfig:
        if self.type is not None:
            storage_from_config(self.location())
        return self


class SharedFsStorage(StorageConfig):
    """A directory that all machines can access."""

    type: Literal["shared_fs"] = "shared_fs"
    host_path: str
    storage_path: str | None = None
    container_path: str | None = None
    checkpoint_path: str | None = None
    tensorboard_path: str | None = None
    propagation: str | None = None


class DirectoryStorage(StorageConfig):
    """A directory inside containers."""

    type: Literal["directory"] = "directory"
    container_path: str


class S3Storage(StorageConfig):
    """An S3 bucket."""

    type: Literal["s3"] = "s3"
    bucket: str
    prefix: str | None = None
    endpoint_url: str | None = None
    access_key: str | None = None
    secret_key: str | None = None
    session_token: str | None = None


class GcsStorage(StorageConfig):
    """A Google Cloud Storage bucket."""

    type: Literal["gcs"] = "gcs"
    bucket: str
    prefix: str | None = None


class AzureStorage(StorageConfig):
    """An Azure Blob Storage container."""

    type: Literal["azure"] = "azure"
    container: str
    connection_string: str | None = None
    account_url: str | None = None
    credential: str | None = None

    @model_validator(mode="after")
    def _logs_in_one_way(self) -> AzureStorage:
        if self.connection_string is not None and self.account_url is not None:
            refuse(("account_url",), "cannot be given together with connection_string: delete one of them")
        return self


STORAGES: dict[str, type[StorageConfig]] = variants(
    "type", SharedFsStorage, DirectoryStorage, S3Storage, GcsStorage, AzureStorage
)
_REFUSED = {"hdfs": "it was removed from Determined; copy the checkpoints to a storage of another type"}


def _read(value: Any) -> StorageConfig:
    if isinstance(value, StorageConfig):
        return value
    if isinstance(value, dict) and value.get("type") is None:
        return StorageConfig.model_validate(value)
    return read_variant(value, "type", STORAGES, _REFUSED)


AnyStorage = Annotated[SerializeAsAny[StorageConfig], BeforeValidator(_read)]
