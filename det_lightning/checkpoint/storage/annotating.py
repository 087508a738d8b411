"""Adding facts that only Determined's master knew to the checkpoints of a storage."""

from __future__ import annotations

import dataclasses
from typing import Any

from det_lightning.checkpoint.format.layout import (
    LOAD_DATA_FILE,
    MASTER_KEY,
    METADATA_FILE,
    WRITTEN_KEY,
    as_time,
    with_entries,
)
from det_lightning.checkpoint.format.master_export import ExportedCheckpoint, MasterExport
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import Location, explain_errors, is_name
from det_lightning.files.strict_json import to_json
from det_lightning.masking import short_text


@dataclasses.dataclass
class Annotation:
    """The facts of an export about the checkpoints of a storage, by id, and the changes to write.

    ``annotated`` will change, ``unchanged`` have the entries already, and ``without_metric`` are checkpoints of both
    lists without a value of the searcher metric. ``not_in_storage`` were not deleted on the platform, ``unreadable``
    have no readable ``metadata.json``, ``not_in_export`` are complete. ``changes`` are the files to write, with the new
    content.
    """

    annotated: list[str] = dataclasses.field(default_factory=list)
    unchanged: list[str] = dataclasses.field(default_factory=list)
    without_metric: list[str] = dataclasses.field(default_factory=list)
    not_in_storage: list[str] = dataclasses.field(default_factory=list)
    unreadable: list[str] = dataclasses.field(default_factory=list)
    not_in_export: list[str] = dataclasses.field(default_factory=list)
    changes: list[tuple[Location, dict[str, Any]]] = dataclasses.field(default_factory=list)


def plan_annotation(storage: CheckpointStorage, export: MasterExport) -> Annotation:
    """Plan the changes, without writing anything.

    Raise a ``ValueError`` that lists all mistakes with file, key and value if the export contradicts a checkpoint, or
    has values that cannot be ids.
    """
    mistakes = [
        f"{one.file}: uuid is {one.checkpoint_id!r:.80}, which cannot be the id of a checkpoint"
        for one in export.checkpoints.values()
        if not is_name(one.checkpoint_id)
    ]
    if mistakes:
        raise ValueError("; ".join(mistakes))
    there = storage.list_ids(complete=False)
    plan = Annotation(not_in_export=[name for name in storage.list_ids() if name not in export.checkpoints])
    for exported in export.checkpoints.values():
        if exported.checkpoint_id in there:
            mistakes += _plan_one(plan, storage, export, exported)
        elif not exported.is_deleted:
            plan.not_in_storage.append(exported.checkpoint_id)
    if mistakes:
        raise ValueError(f"Nothing is written, since the files do not belong to {storage}: {'; '.join(mistakes)}")
    return plan


def carry_out_annotation(plan: Annotation) -> None:
    """Write the planned changes, each file completely or not at all."""
    for file, content in plan.changes:
        with explain_errors("writing", file):
            if file.exists():  # otherwise another process has just deleted the checkpoint
                file.write(to_json(content).encode("utf-8"))


def _plan_one(
    plan: Annotation, storage: CheckpointStorage, export: MasterExport, exported: ExportedCheckpoint
) -> list[str]:
    """Add a checkpoint of the storage to the plan; return all contradictions to the export."""
    directory = storage.root.checkpoint(exported.checkpoint_id)
    file = directory / METADATA_FILE
    with explain_errors("reading", directory):
        is_link = directory.link_target() is not None or file.link_target() is not None
        info = storage.info(exported.checkpoint_id)
        present = {} if is_link else info.metadata
        if not present:
            plan.unreadable.append(exported.checkpoint_id)
            return []
        has_load_data = info.has_file(LOAD_DATA_FILE)
        written_s = info.file_time or 0.0
    entries = export.make_entries(exported)
    if mistakes := _contradictions(present, entries, exported):
        return mistakes
    if not has_load_data and (config := export.find_config(exported)) is not None:
        entries["experiment_config"] = config  # a release up to 0.17.7 needs only this and the hyperparameters
    entries[MASTER_KEY] = _merge_values(present.get(MASTER_KEY), {**entries[MASTER_KEY], WRITTEN_KEY: written_s})
    if info.notes.time_s is None:
        reported_s = as_time(exported.time_s)
        entries["time"] = written_s if reported_s is None else reported_s
    content = with_entries(present, entries)
    if _as_json(content) == _as_json(present):
        plan.unchanged.append(exported.checkpoint_id)
    else:
        plan.annotated.append(exported.checkpoint_id)
        plan.changes.append((file, content))
    if "metric" not in content:
        plan.without_metric.append(exported.checkpoint_id)
    return []


def _contradictions(present: dict[str, Any], entries: dict[str, Any], exported: ExportedCheckpoint) -> list[str]:
    expected: dict[str, Any] = {"steps_completed": exported.steps_completed}
    expected |= {name: entries[name] for name in ("trial", "experiment")}
    # Older releases of Determined write them under these names into what they download.
    expected |= {f"{name}_id": int(entries[name]) for name in ("trial", "experiment")}
    if MASTER_KEY not in present:
        expected |= {name: entries[name] for name in ("metric", "hparams") if name in entries}
    return [
        f"{exported.file}: {name} of checkpoint {exported.checkpoint_id} is {value!r:.80}, but its {METADATA_FILE} "
        f"says {short_text(present[name])}"
        for name, value in expected.items()
        if value is not None and present.get(name) is not None and _as_json(present[name]) != _as_json(value)
    ]


def _merge_values(known: Any, new: Any) -> Any:
    """Return the new annotation, with values of the earlier annotation in place of None."""
    if isinstance(known, dict) and isinstance(new, dict):
        return {name: _merge_values(known.get(name), value) for name, value in new.items()}
    return known if new is None else new


def _as_json(value: Any) -> str:
    return to_json(value, sort_keys=True)
