"""The catalogue of a bucket: facts about all checkpoints from few requests, by an index and a listing.

Reading costs a request per checkpoint. The index is an object next to the checkpoints that holds earlier answers. The
index may be missing, damaged or out of date, and writers of checkpoints need not update it: the listing shows which
checkpoints exist, and checkpoints missing from the index are read. Several processes may write the index; overwritten
entries are read again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR, METADATA_FILE
from det_lightning.checkpoint.format.manifest import (
    CHECKSUM_KEY,
    MANIFEST_KEY,
    find_metadata_damage,
    with_checksum,
    with_entries,
)
from det_lightning.checkpoint.storage.location import Location, explain_errors, is_name, is_own_id
from det_lightning.checkpoint.storage.metadata import CheckpointInfo, call_in_parallel, describe, read_metadata
from det_lightning.checkpoint.storage.staging import list_marks
from det_lightning.escaping import get_logger
from det_lightning.files.strict_json import is_shallow, to_json

logger = get_logger(__name__)

_INDEX_FILE = "checkpoints.json"
_VERSION = 1
# Large entries of metadata.json that are only needed to open a checkpoint.
_LEFT_OUT = {MANIFEST_KEY, CHECKSUM_KEY, "experiment_config"}
# The index is rewritten once more than this many checkpoints had to be read.
_MOST_UNINDEXED = 4
# The largest size that file systems support.
_MAX_BYTES = 2**63 - 1
# An index for some 100,000 checkpoints. A larger one is neither written nor read.
_MAX_INDEX_BYTES = 64 * 1024 * 1024


def survey(root: Location) -> list[CheckpointInfo]:
    """Return the facts about all checkpoints below ``root``, sorted by id, including incomplete ones.

    Metadata from the index lack the entries for opening a checkpoint.
    """
    known = read_index(root)
    names = [name for name in root.list_names() if is_name(name) or name == BOOKKEEPING_DIR] if known else []
    # An entry of the index is trusted if its checkpoint exists, and is not being changed.
    changing = list_marks(root) if BOOKKEEPING_DIR in names else {*names}
    indexed = {name: known[name] for name in names if name in known and name not in changing}
    missing = [name for name in names if name not in indexed and name != BOOKKEEPING_DIR]
    if len(names) <= 2 * len(missing):
        # Listing everything at once takes fewer requests than listing each directory.
        files = _files_by_directory(root)
        has_bookkeeping = BOOKKEEPING_DIR in files
        missing = [name for name in files if name not in indexed and is_name(name)]
        read = call_in_parallel(root, lambda name: describe(root / name, files[name]), missing)
    else:
        has_bookkeeping = BOOKKEEPING_DIR in names
        read = call_in_parallel(root, lambda name: describe(root / name), missing)
    found = {**indexed, **{info.id: info for info in read if info is not None}}
    new = sum(_is_indexable(info) for info in read)
    # No index is written into another program's bucket.
    if has_bookkeeping and (new > _MOST_UNINDEXED or len(known) > 2 * len(indexed) + _MOST_UNINDEXED):
        _write_index(root, found.values())
    return [found[name] for name in sorted(found)]


def _files_by_directory(root: Location) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    try:
        files = root.find_files()
    except FileNotFoundError:  # there is no such bucket
        return found
    for path, info in files.items():
        name, _, rest = path.partition("/")
        if rest:
            found.setdefault(name, {})[rest] = info
    return found


def _is_indexable(info: CheckpointInfo) -> bool:
    # A directory with another name may be replaced later; one with such an id never is.
    return info.complete and METADATA_FILE in info.markers and bool(info.metadata) and is_own_id(info.id)


def read_index(root: Location) -> dict[str, CheckpointInfo]:
    """Return the facts in the index; empty if the index is missing or damaged."""
    file = root.bookkeeping(_INDEX_FILE)
    try:
        parsed = json.loads(file.read(_MAX_INDEX_BYTES))
        if not isinstance(parsed, dict) or CHECKSUM_KEY not in parsed or find_metadata_damage(parsed) is not None:
            raise ValueError("its checksum differs")
        # Another release may have written another version.
        entries = parsed["checkpoints"] if parsed["version"] == _VERSION else []
        return {info.id: info for info in map(_parse_entry, entries)}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as e:
        reason = f"{e!s:.200}"
        logger.warning("The index %s is damaged (%s). The checkpoints themselves are read.", file, reason)
        return {}


def _parse_entry(entry: dict[str, Any]) -> CheckpointInfo:
    info = CheckpointInfo(complete=True, markers=frozenset({METADATA_FILE}), **entry)
    times = [time for time in (info.written, info.metadata_written) if time is not None]
    if (
        not (isinstance(info.id, str) and isinstance(info.metadata, dict))
        or not (type(info.size_bytes) is int and 0 <= info.size_bytes <= _MAX_BYTES)
        or not is_shallow(info.metadata)
        or not all(isinstance(time, int | float) and math.isfinite(time) for time in times)
    ):
        raise TypeError(f"an entry is {info!r:.200}")
    return info


def _write_index(root: Location, infos: Iterable[CheckpointInfo]) -> None:
    """Write the index; after a failure the next survey only takes longer."""
    entries = [
        {
            "id": info.id,
            "metadata": _select_for_index(info.metadata),
            "size_bytes": info.size_bytes,
            "written": info.written,
            "metadata_written": info.metadata_written,
        }
        for info in infos
        if _is_indexable(info)
    ]
    file = root.bookkeeping(_INDEX_FILE)
    try:
        content = json.dumps(with_checksum({"version": _VERSION, "checkpoints": entries})).encode("ascii")
        if len(content) > _MAX_INDEX_BYTES:
            raise ValueError(f"it would have {len(content):,} bytes; at most {_MAX_INDEX_BYTES:,} are read")
        file.write(content)
    except Exception as e:  # each file system has errors of its own
        logger.info("The index %s cannot be written, so the next reader reads each checkpoint: %s", file, e)


def _select_for_index(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if name not in _LEFT_OUT}


def require_current(root: Location, infos: Sequence[CheckpointInfo]) -> None:
    """Raise a ``StorageError``, and remove the index, if metadata have changed since :func:`survey`."""
    if not root.is_object_store:
        return
    with explain_errors("reading", root):
        found = call_in_parallel(root, read_metadata, [root.checkpoint(info.id) for info in infos])
        pairs = zip(infos, found, strict=True)
        changed = [info.id for info, now in pairs if _select_for_index(now) != _select_for_index(info.metadata)]
        if changed:
            remove_index(root)
    if changed:
        raise errors.StorageError(
            f"The index of {root} was out of date: the metadata of {len(changed)} checkpoints, such as "
            f"{changed[0]}, have changed or are gone. The index was removed, and no checkpoint was deleted. "
            "Try again."
        )


def add_entries(root: Location, checkpoint_id: str, entries: Mapping[str, Any]) -> bool:
    """Add entries to the ``metadata.json`` of a complete checkpoint, and replace the file as a whole.

    Return False, and change nothing, if the metadata are gone, are damaged, or have these entries.
    """
    checkpoint = root.checkpoint(checkpoint_id)
    known = read_metadata(checkpoint)
    if not known or entries.keys() & known.keys():
        return False
    (checkpoint / METADATA_FILE).write(to_json(with_entries(known, entries)).encode())
    if root.is_object_store:
        remove_index(root)
    return True


def remove_index(root: Location) -> None:
    """Remove the index after a change of indexed checkpoints; the next survey reads all metadata."""
    root.bookkeeping(_INDEX_FILE).remove()
