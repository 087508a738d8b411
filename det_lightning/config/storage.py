"""The ``checkpoint_storage`` section: the place of checkpoints, and how many to keep."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, SerializeAsAny, create_model, model_validator

from det_lightning.checkpoint.storage.storage_config import STORAGE_TYPES, StorageType, storage_from_config
from det_lightning.config.document import KeyPath
from det_lightning.config.section import Count, Section, read_variant, refuse


class StorageConfig(Section):
    """How many checkpoints to keep. Without a type, checkpoints go into the experiment's directory."""

    place: ClassVar[KeyPath] = ("checkpoint_storage",)

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
            chosen = [name for name in STORAGE_TYPES[self.type].alternatives if getattr(self, name) is not None]
            if len(chosen) > 1:
                refuse((chosen[1],), f"cannot be set together with {chosen[0]}: delete one of the two")
        return self


def _make_model(name: str, kind: StorageType) -> type[StorageConfig]:
    fields: dict[str, Any] = {"type": (Literal[name], name)}
    fields |= dict.fromkeys(kind.required, (str, ...))
    fields |= dict.fromkeys(kind.optional, (str | None, None))
    return create_model(f"{name}_storage", __base__=StorageConfig, __doc__=kind.description, **fields)


STORAGES = {name: _make_model(name, kind) for name, kind in STORAGE_TYPES.items()}
_OF_ANY = StorageConfig.model_fields
StorageConfig.siblings = STORAGES
_REFUSED = {"hdfs": "it was removed from Determined; copy the checkpoints to a storage of another type"}


def _read(value: Any) -> StorageConfig:
    if isinstance(value, StorageConfig):
        return value
    if isinstance(value, dict) and value.get("type") is None:
        for key in value:
            if kinds := [name for name, model in STORAGES.items() if key in {*model.model_fields} - {*_OF_ANY}]:
                refuse((), f"type is missing; your master supplied it; {key} belongs to {' and '.join(kinds)}")
        return StorageConfig.model_validate(value)
    return read_variant(value, "type", STORAGES, _REFUSED)


AnyStorage = Annotated[SerializeAsAny[StorageConfig], BeforeValidator(_read)]
