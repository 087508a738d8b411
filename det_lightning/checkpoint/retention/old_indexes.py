"""The indexes that earlier releases kept of each trial: read for the metrics that only they know, and then removed."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.claims import remove_if_empty
from det_lightning.checkpoint.storage.location import Location, explain_errors, is_name
from det_lightning.checkpoint.storage.metadata import CheckpointInfo
from det_lightning.checkpoint.storage.survey import add_entries
from det_lightning.escaping import escape
from det_lightning.files.strict_json import as_number, read_every_number

logger = logging.getLogger(__name__)

_INDEX_DIR = "index"


def with_metrics(root: Location, infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return what is known about checkpoints of a storage, with the metrics that only the old indexes have."""
    with explain_errors("reading the index in", root):
        folder = root.bookkeeping(_INDEX_DIR)
        experiments = [folder / name for name in folder.list_names() if is_name(name)]
        files = [one / name for one in experiments for name in one.list_names() if name.endswith(".json")]
        metrics = {checkpoint_id: metric for file in files for checkpoint_id, metric in _read(file).items()}
    return [
        dataclasses.replace(info, metadata={**info.metadata, "metric": metrics[info.id]})
        if info.id in metrics and "metric" not in info.metadata
        else info
        for info in infos
    ]


def move_metrics(storage: CheckpointStorage, experiment: str, trial: str) -> None:
    """Write the metrics in the index of a trial into the metadata of its checkpoints, and remove the index."""
    if not (is_name(experiment) and is_name(trial)):
        return  # such a trial had no index
    file = storage.root.bookkeeping(_INDEX_DIR, experiment, f"{trial}.json")
    with explain_errors("reading", file):
        if not file.exists():
            return
        metrics = _read(file)
    for checkpoint_id, metric in metrics.items():
        if is_name(checkpoint_id):
            add_metric(storage, checkpoint_id, metric)
    storage.retry.call("removing", file.remove, where=file)
    if file.is_local:
        remove_if_empty(file.local_path.parent)


def add_metric(storage: CheckpointStorage, checkpoint_id: str, metric: Mapping[str, Any]) -> bool:
    """Add a metric to the metadata of a checkpoint; return False if they are gone, are damaged, or have one."""
    write = functools.partial(add_entries, storage.root, checkpoint_id, {"metric": dict(metric)})
    return storage.retry.call("writing the metadata of", write, where=checkpoint_id)


def _read(file: Location) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(file.read())
        entries = read_every_number(content["checkpoints"])
        values = {str(entry["id"]): as_number(entry.get("metric")) for entry in entries}
        rest = {"name": content.get("metric"), "smaller_is_better": content.get("smaller_is_better") is not False}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        logger.warning("The old index %s is damaged, and is not used: %s", file, f"{escape(e):.200}")
        return {}
    return {name: {**rest, "value": value} for name, value in values.items() if value is not None}
