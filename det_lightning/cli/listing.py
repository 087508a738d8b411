"""``det-lightning checkpoint ls``."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from typing import Any

from det_lightning.checkpoint.retention.rule import CheckpointRecord
from det_lightning.checkpoint.retention.trial_index import TrialIndex, read_indexes
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.metadata import CheckpointInfo, notes_in
from det_lightning.cli.finding import open_storage
from det_lightning.cli.output import describe_age, describe_metric, describe_size, print_json, print_table

__all__ = ["list_checkpoints"]


def list_checkpoints(url: str, options: Mapping[str, Any], as_json: bool) -> None:
    """Print what can be told of the checkpoints in a storage, the newest first; then the links beside them."""
    storage = open_storage(url, options)
    found, links = _collect(storage), storage.list_links()
    if as_json:
        print_json({"storage": str(storage), "checkpoints": found, **({"links": links} if links else {})})
        return
    now = time.time()
    names = {entry["metric"]["name"] for entry in found if entry["metric"]}
    # Mostly all have the same metric, whose name need not stand in every line.
    common = names.pop() if len(names) == 1 else None
    print_table(
        ["uuid", ">steps", str(common or "metric"), ">size", ">age", "complete"],
        [
            [
                entry["uuid"],
                entry["steps_completed"],
                describe_metric(entry["metric"], with_name=common is None),
                describe_size(entry["size_bytes"]),
                None if entry["written_s"] is None else describe_age(now - entry["written_s"]),
                "yes" if entry["complete"] else "NO",
            ]
            for entry in found
        ]
        + [[f"{name} -> {target or 'unknown'}", None, None, None, None, "link"] for name, target in links.items()],
    )


def _collect(storage: CheckpointStorage) -> list[dict[str, Any]]:
    recorded = {record.id: (index, record) for index in read_indexes(storage.root) for record in index.records}
    described = storage.describe(storage.list_ids(complete=False))
    found = [_describe(info, recorded.get(info.id)) for info in described]
    return sorted(found, key=lambda entry: (-(entry["written_s"] or 0.0), entry["uuid"]))


def _describe(info: CheckpointInfo, recorded: tuple[TrialIndex, CheckpointRecord] | None) -> dict[str, Any]:
    notes = notes_in(info.metadata)
    trial, experiment, steps = notes.trial, notes.experiment, notes.steps_completed
    metric = None if notes.metric is None else {"name": notes.metric_name, "value": notes.metric}
    if recorded is not None:
        index, record = recorded
        trial, experiment = index.trial, index.experiment
        steps = record.steps_completed if steps is None else steps
        if record.metric is not None:
            metric = {"name": index.metric_name, "value": record.metric}
    written = info.written if notes.time_s is None else notes.time_s
    return {
        "uuid": info.id,
        "complete": info.complete,
        "steps_completed": steps,
        "metric": metric,
        "size_bytes": info.size_bytes,
        "written_s": written,
        "written": _as_date(written),
        "trial": trial,
        "experiment": experiment,
    }


def _as_date(time_s: float | None) -> str | None:
    try:
        return None if time_s is None else datetime.datetime.fromtimestamp(time_s, datetime.timezone.utc).isoformat()
    except (ValueError, OverflowError, OSError):  # not a time that a calendar knows
        return None
