"""A checkpoint's files: names, completeness, the manifest with checksums, links, the conversion of older layouts.

Determined 0.38 writes ``state_dict.pth``, ``trial_state.pkl``, ``load_data.json``, ``code/`` and, last of all,
``metadata.json``. det_lightning adds ``resume.pth``, with the rest of the state for an exact resume, and a manifest in
``metadata.json``; Determined ignores both. A sharded checkpoint has ``shards/`` in place of ``state_dict.pth``, and
Determined cannot read the shards; see ``det_lightning/checkpoint/format/shards.py``. Without a manifest, or a checksum
of the entries, as in checkpoints of Determined, nothing is compared.

Change here: what the manifest says of a file is written by ``describe_file`` and compared by ``find_damage``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from fastcrc.crc32 import iscsi as extend_crc32c

from det_lightning import errors
from det_lightning.escaping import get_logger
from det_lightning.files.plain_values import as_plain
from det_lightning.files.strict_json import MAX_DEPTH, MAX_SMALL_FILE_BYTES, is_shallow, spell_numbers
from det_lightning.masking import short_text

logger = get_logger(__name__)

STATE_FILE = "state_dict.pth"
TRIAL_STATE_FILE = "trial_state.pkl"
LOAD_DATA_FILE = "load_data.json"
METADATA_FILE = "metadata.json"
#: In checkpoints of TensorFlow Estimators; it names the files with the weights.
TENSORFLOW_FILE = "checkpoint"
CODE_DIR = "code"

#: det_lightning's own: what an exact resume needs beyond Determined's format.
RESUME_FILE = "resume.pth"
#: det_lightning's own: what Lightning's checkpoints hold beyond a trial, such as the state of callbacks.
LIGHTNING_FILE = "lightning.pth"
#: det_lightning's own: in a sharded checkpoint, the directory with what each rank held, and the file with the rest.
SHARDS_DIR = "shards"
SHARDED_STATE_FILE = f"{SHARDS_DIR}/state.pth"
#: det_lightning's own: the directory next to the checkpoints, with a bucket's index, marks and claims.
BOOKKEEPING_DIR = ".det_lightning"
#: In the staging directory of a writer to a remote storage; locked while the writer lives.
STAGING_MARK = ".det_lightning-writer.json"

#: det_lightning's own: the entry of ``metadata.json``, added later, with what Determined's master knew about one of its
#: checkpoints; and in it, when the file had been written before, in seconds since 1970.
MASTER_KEY = "master"
WRITTEN_KEY = "written_before_s"
#: det_lightning's own entries of ``metadata.json``: the manifest, and the checksum of all other entries.
MANIFEST_KEY = "files"
CHECKSUM_KEY = "metadata_crc32c"

#: Where releases put the state, newest first; the last is for sharded checkpoints.
STATE_FILES = (
    STATE_FILE,
    f"determined/{STATE_FILE}",
    f"pedl/{STATE_FILE}",
    "checkpoint.pt",
    TENSORFLOW_FILE,
    SHARDED_STATE_FILE,
)
# Determined's trial classes whose checkpoints have other files.
_FOREIGN_TRIALS = ("DeepSpeedTrial", "TFKerasTrial")
# The names of a TFKerasTrial's files begin with this; TensorFlow's file `checkpoint` is often among them.
_KERAS_PREFIX = "determined-keras"
#: The name of ``trial_state.pkl`` in older releases.
WORKLOAD_FILE = "workload_sequencer.pkl"

#: The files that are read to resume from a checkpoint, besides ``metadata.json``.
FILES_READ = (*STATE_FILES, TRIAL_STATE_FILE, LOAD_DATA_FILE, RESUME_FILE, LIGHTNING_FILE)

#: Determined stores counts in 32-bit columns.
MAX_COUNT = 2**31 - 1
# The year 10000.
_LATEST_TIME_S = 253402300800.0
_CHUNK_BYTES = 1024 * 1024


def is_of_keras(names: Iterable[str]) -> bool:
    """Return whether a ``TFKerasTrial`` wrote a checkpoint with files of these names."""
    return any(name.startswith(_KERAS_PREFIX) for name in names)


def find_state_file(directory: pathlib.Path) -> pathlib.Path:
    """Return the path of the weights in a checkpoint of any release."""
    if directory.is_dir() and is_of_keras(path.name for path in directory.iterdir()):
        raise _unknown_kind(directory, "of a TFKerasTrial")
    for name in STATE_FILES:
        if (directory / name).is_file():
            return directory / name
    raise errors.CheckpointNotFound(f"{directory} holds no checkpoint: {' and '.join(STATE_FILES)} are missing.")


def find_files_of_tensorflow(directory: pathlib.Path) -> list[str]:
    """Return the names of the files in ``directory`` that TensorFlow wrote, or may read."""
    ours = {*FILES_READ, METADATA_FILE} - {TENSORFLOW_FILE}
    files = [path.relative_to(directory) for path in directory.rglob("*") if path.is_file()]
    return sorted(path.as_posix() for path in files if path.parts[0] != CODE_DIR and path.as_posix() not in ours)


def is_sharded(directory: pathlib.Path, state_file: pathlib.Path) -> bool:
    """Return whether a checkpoint with this state file is sharded."""
    return state_file == directory / SHARDED_STATE_FILE


def require_complete(directory: pathlib.Path) -> None:
    """Raise a ``CheckpointError`` unless ``directory`` holds a complete checkpoint.

    Writers finish with ``metadata.json``, except releases before 0.18; see :func:`may_lack_metadata`.
    """
    if not directory.is_dir():
        raise errors.CheckpointNotFound(f"There is no checkpoint directory {directory}.")
    has_metadata = (directory / METADATA_FILE).is_file()
    load_data = directory / LOAD_DATA_FILE
    trial_type = read_json(load_data).get("trial_type") if load_data.is_file() else None
    if trial_type in _FOREIGN_TRIALS:
        raise _unknown_kind(directory, f"of a {trial_type}")
    try:
        find_state_file(directory)
    except errors.CheckpointNotFound as e:
        if has_metadata:
            _require_framework_of_trials(directory)
            raise errors.IncompleteCheckpointError(
                f"{directory} is an incomplete checkpoint: {STATE_FILE} is missing. Use another checkpoint."
            ) from e
        raise
    if not has_metadata and not may_lack_metadata({path.name for path in directory.iterdir()}):
        raise errors.IncompleteCheckpointError(
            f"{directory} is an incomplete checkpoint: {METADATA_FILE} is missing, because the writer did not "
            "finish. Use another checkpoint."
        )


def may_lack_metadata(names: Container[str]) -> bool:
    """Return whether a checkpoint with files of these names is complete without ``metadata.json``.

    Releases before 0.18 wrote no ``metadata.json``. Releases up to 0.17.7 wrote no ``load_data.json`` either; later
    ones left a ``workload_sequencer.pkl``, a file that det_lightning never writes.
    """
    return RESUME_FILE not in names and (LOAD_DATA_FILE not in names or WORKLOAD_FILE in names)


def _require_framework_of_trials(directory: pathlib.Path) -> None:
    """Raise an ``InvalidCheckpointException`` if ``metadata.json`` names another author than a PyTorchTrial."""
    metadata = read_json(directory / METADATA_FILE)
    framework = metadata.get("framework") or metadata.get("tensorflow_version")
    if "tensorflow_version" in metadata or (isinstance(framework, str) and framework.startswith("tensorflow")):
        raise _unknown_kind(directory, f"of TensorFlow or Keras ({framework})")
    if names_no_framework(metadata) and not (directory / LOAD_DATA_FILE).is_file():
        raise _unknown_kind(directory, "of a Core API script, which alone can read the files")


def names_no_framework(metadata: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint without ``load_data.json`` has the ``metadata.json`` of a Core API script."""
    return not any(metadata.get(name) for name in ("framework", "torch_version", "tensorflow_version"))


def _unknown_kind(directory: pathlib.Path, kind: str) -> errors.InvalidCheckpointException:
    return errors.InvalidCheckpointException(
        f"{directory} is a checkpoint {kind:.200}. det_lightning loads checkpoints of a PyTorchTrial "
        "or an EstimatorTrial. Load this checkpoint with the code that wrote the files, or use another checkpoint."
    )


def read_bytes(path: pathlib.Path) -> bytes:
    """Read a small file; raise an ``IncompleteCheckpointError`` if the file is large or cannot be read."""
    try:
        size = path.stat().st_size
        if size > MAX_SMALL_FILE_BYTES:
            raise errors.IncompleteCheckpointError(
                f"{path} has {size:,} bytes; expected a few thousand. The file is damaged, or another kind of file."
            )
        return path.read_bytes()
    except OSError as e:
        raise errors.IncompleteCheckpointError(f"{path} cannot be read: {e}") from e


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON object from a file; raise an ``IncompleteCheckpointError`` for any other content."""
    content = read_bytes(path)
    try:
        parsed = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise errors.IncompleteCheckpointError(f"{path} cannot be read and may be damaged: {e}") from e
    if not isinstance(parsed, dict):
        raise errors.IncompleteCheckpointError(f"{path} must hold a JSON object; got {type(parsed).__name__}.")
    if not is_shallow(parsed):
        raise errors.IncompleteCheckpointError(f"{path} is damaged: its values are nested over {MAX_DEPTH} deep.")
    return parsed


def find_wrong_counts(counts: dict[str, Any]) -> str | None:
    """Describe the values that should be counts, as in a ``TrialState``, but are not; None if all are."""
    wrong = {name: value for name, value in counts.items() if type(value) is not int or not 0 <= value <= MAX_COUNT}
    if not wrong:
        return None
    return f"must hold counts, which are integers from 0 to {MAX_COUNT}; got {short_text(wrong)}"


def as_time(value: Any) -> float | None:
    """Return a time in seconds since 1970; None for anything else, and for a time after the year 9999."""
    # An integer may be larger than any float.
    is_number = type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
    return float(value) if is_number and math.isfinite(value) and 0 <= value <= _LATEST_TIME_S else None


# Up to 0.12.12 a trial had one model, one optimizer and one scheduler, and no lists of them.
_SINGLE_KEYS = {
    "model_state_dict": "models_state_dict",
    "optimizer_state_dict": "optimizers_state_dict",
    "lr_scheduler": "lr_schedulers_state_dict",
}


def modernize(state: dict[str, Any], source: str) -> None:
    """Convert, in place, the keys of an older release's state to those of 0.38."""
    both = [f"{old!r} and {new!r}" for old, new in _SINGLE_KEYS.items() if old in state and new in state]
    if both:
        raise errors.InvalidCheckpointException(
            f"{source} holds both {' and both '.join(both)}; no release of Determined wrote such a file."
        )
    is_old = any(old in state for old in _SINGLE_KEYS)
    for old, new in _SINGLE_KEYS.items():
        if old in state:
            single = state.pop(old)
            state[new] = [] if single is None else [single]
        elif is_old:
            state.setdefault(new, [])
    _require_kinds(state, source)


def _require_kinds(state: dict[str, Any], source: str) -> None:
    kinds = {**dict.fromkeys(_SINGLE_KEYS.values(), list), "callbacks": dict, "rng_state": dict}
    wrong = [
        f"{key!r} must be a {kind.__name__}"
        for key, kind in kinds.items()
        if not isinstance(state.get(key), kind | None)
    ]
    for key, inner in (("optimizers_state_dict", "param_groups"), ("lr_schedulers_state_dict", "_last_lr")):
        for one in state.get(key) or [] if not wrong else []:
            if isinstance(one, dict) and not isinstance(one.get(inner), list | None):
                wrong.append(f"{inner!r} in {key!r} must be a list")
    if wrong:
        raise errors.InvalidCheckpointException(
            f"{source} is damaged, or not a checkpoint of a trial: {'; '.join(wrong)}."
        )


#: The entries of ``load_data.json``.
LOAD_DATA_ENTRIES = frozenset({"trial_type", "experiment_config", "hparams", "trial_cls_spec", "is_trainer"})


def make_load_data(
    hparams: Any, experiment_config: Any, trial_cls_spec: str | None = None, is_trainer: bool = True
) -> dict[str, Any]:
    """Return the content of ``load_data.json``."""
    return {
        "trial_type": "PyTorchTrial",
        "experiment_config": experiment_config,
        "hparams": hparams,
        "trial_cls_spec": trial_cls_spec,
        "is_trainer": is_trainer,
    }


# The manifest


def describe_files(directory: pathlib.Path, known: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return size and CRC-32C (the checksum of object stores) of every file below ``directory``, by relative path.

    Files in ``known`` keep the description given there and are not read.
    """
    found = dict(known)
    for folder, _, names in os.walk(directory, onerror=_raise):
        for path in map(pathlib.Path(folder).joinpath, names):
            name = path.relative_to(directory).as_posix()
            if name != METADATA_FILE and name not in found and path.is_file():
                found[name] = describe_file(path)
    return dict(sorted(found.items()))


def describe_file(path: pathlib.Path) -> dict[str, Any]:
    """Return size and CRC-32C of a file."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = extend_crc32c(chunk, checksum)
    return {"bytes": path.stat().st_size, "crc32c": f"{checksum:08x}"}


def describe_content(content: bytes) -> dict[str, Any]:
    """Return size and CRC-32C of a file with this content."""
    return {"bytes": len(content), "crc32c": f"{extend_crc32c(content):08x}"}


def _raise(error: OSError) -> None:
    raise error


def with_checksum(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``metadata.json`` as strict JSON, with a checksum of all entries.

    Entries that JSON cannot hold are left out, and a warning names each.
    """
    try:
        entries = json.loads(json.dumps(metadata, allow_nan=False))  # in the form in which they will be read
    except (TypeError, ValueError):
        losses: list[str] = []
        entries = spell_numbers(as_plain(metadata, METADATA_FILE, losses))
        if losses:
            logger.warning("The checkpoint cannot hold all values: %s.", "; ".join(losses))
    return {**entries, CHECKSUM_KEY: _checksum_of_entries(entries)}


def with_entries(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``metadata`` with entries added or replaced, and a new checksum if it had one."""
    content = {name: value for name, value in metadata.items() if name != CHECKSUM_KEY} | {**entries}
    return with_checksum(content) if CHECKSUM_KEY in metadata else dict(spell_numbers(content))


def find_metadata_damage(metadata: Mapping[str, Any]) -> str | None:
    """Describe the damage if the entries of ``metadata.json`` do not match their checksum; None if they do."""
    if CHECKSUM_KEY not in metadata:
        return None
    expected = metadata[CHECKSUM_KEY]
    try:
        found = _checksum_of_entries({name: value for name, value in metadata.items() if name != CHECKSUM_KEY})
    except (RecursionError, ValueError):  # more deeply nested, or with larger numbers, than is ever written
        return f"{METADATA_FILE} holds values that are never written there"
    if found == expected:
        return None
    return f"the entries of {METADATA_FILE} have the checksum {found} in place of {expected!r:.200}"


def find_damage(directory: pathlib.Path, names: Sequence[str] | None = None) -> list[str]:
    """Compare files with the manifest, and describe each difference.

    ``names`` defaults to all listed files. Unlisted files are skipped; Determined's checkpoints list none.
    """
    metadata = read_metadata(directory)
    listed = metadata.get(MANIFEST_KEY, {})
    chosen = listed if names is None else {name: listed[name] for name in names if name in listed}
    found = [find_metadata_damage(metadata), *(_compare(directory, name, entry) for name, entry in chosen.items())]
    return [damage for damage in found if damage is not None]


def require_unchanged(directory: pathlib.Path, names: Sequence[str]) -> None:
    """Raise an ``IncompleteCheckpointError`` that names all differences, unless the files match the manifest."""
    damage = find_damage(directory, names)
    if damage:
        raise errors.IncompleteCheckpointError(
            f"The checkpoint {directory} is damaged: {'; '.join(damage)}. Use another checkpoint. If you changed the "
            f"files on purpose, remove {MANIFEST_KEY!r} and {CHECKSUM_KEY!r} from {METADATA_FILE}, which ends the "
            "comparison."
        )


def leads_out(directory: pathlib.Path, path: pathlib.Path) -> bool:
    """Return whether a file or directory in ``directory`` is a link to a target outside."""
    return path.is_symlink() and not _find_target(path).is_relative_to(directory.resolve())


def require_inside(directory: pathlib.Path) -> None:
    """Raise an ``UnsafeCheckpointError`` that names each link from the checkpoint in ``directory`` to a target outside.

    ``directory`` may be a link itself. ``code/`` is not searched: no link in there is ever followed.
    """
    found = []
    for folder, folders, files in os.walk(directory):
        if pathlib.Path(folder) == directory and CODE_DIR in folders:
            folders.remove(CODE_DIR)
        for path in (pathlib.Path(folder, name) for name in sorted([*folders, *files])):
            if leads_out(directory, path):
                found.append(f"{path} is a link to {_find_target(path)}")
    if found:
        raise errors.UnsafeCheckpointError(
            f"{'; '.join(found):.2000}: nothing is read through a link that leads out of the checkpoint. Replace the "
            "link by a copy of the target."
        )


def _find_target(link: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(os.path.realpath(link))  # unlike resolve(), also of links that lead to one another


def find_unlisted(directory: pathlib.Path) -> list[str]:
    """Return the paths of files, among the files to read and in ``code/``, that the manifest does not list."""
    listed = read_metadata(directory).get(MANIFEST_KEY)
    if listed is None:
        return []
    present = [name for name in FILES_READ if os.path.lexists(directory / name)]
    return [name for name in (*present, *_paths_in_code(directory)) if name not in listed]


def split_code(directory: pathlib.Path, *, trusted: bool) -> tuple[list[str], list[str]]:
    """Return the paths of the files in ``code/`` that may be imported, and the paths of everything else there.

    A file may be imported if the manifest lists the file, or if there is no manifest. Unless ``trusted``,
    :func:`require_unchanged` raises for a changed file. Links are not followed.
    """
    listed = read_metadata(directory).get(MANIFEST_KEY)
    if not trusted:
        require_unchanged(directory, [name for name in listed or () if name.startswith(f"{CODE_DIR}/")])
    present = _paths_in_code(directory)
    usable = [name for name, is_file in present.items() if is_file and (listed is None or name in listed)]
    return usable, sorted(present.keys() - {*usable})


def _paths_in_code(directory: pathlib.Path) -> dict[str, bool]:
    """Return the paths in ``code/``, without directories, and whether each is a regular file."""
    code = directory / CODE_DIR
    if code.is_symlink():
        return {CODE_DIR: False}
    found = {}
    for folder, folders, files in os.walk(code):
        for path in (pathlib.Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink() or not path.is_dir():
                found[path.relative_to(directory).as_posix()] = path.is_file() and not path.is_symlink()
    return dict(sorted(found.items()))


def read_metadata(directory: pathlib.Path) -> dict[str, Any]:
    """Return the content of ``metadata.json``, empty without the file; see :func:`read_json`."""
    path = directory / METADATA_FILE
    metadata = read_json(path) if path.is_file() else {}
    manifest = metadata.get(MANIFEST_KEY, {})
    if not isinstance(manifest, dict):
        raise errors.IncompleteCheckpointError(f"{path}: {MANIFEST_KEY!r} must be an object; got {manifest!r:.200}.")
    return metadata


def _compare(directory: pathlib.Path, name: str, entry: Any) -> str | None:
    path = directory / name
    relative = pathlib.PurePosixPath(name)
    shown = f"{METADATA_FILE} lists {json.dumps(name):.200}"
    if ".." in relative.parts or relative.is_absolute():
        return f"{shown}, which lies outside of the checkpoint"
    if str(relative) != name:  # the same file could be listed, and read, any number of times
        return f"{shown}, which is not the plain path of a file"
    if not isinstance(entry, dict) or not {"bytes", "crc32c"} <= entry.keys():
        return f"{METADATA_FILE} describes {name} by {entry!r:.200}"
    try:
        if _leads_through_link(directory, name):
            return f"{name} is a link"
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{name} has {size:,} bytes in place of {entry['bytes']!r:.200}"
        found = describe_file(path)["crc32c"]
    except OSError as e:  # such as a name that is too long
        return f"{name:.200} cannot be read: {e.strerror}"
    if found != entry["crc32c"]:
        return f"{name} has the checksum {found} in place of {entry['crc32c']!s:.200}"
    return None


def _leads_through_link(directory: pathlib.Path, name: str) -> bool:
    """Return whether a file of ``code/`` is a link or lies behind one."""
    path = pathlib.PurePosixPath(name)
    if path.parts[:1] != (CODE_DIR,):
        return False
    return any((directory / part).is_symlink() for part in (path, *path.parents) if part.name)


def _checksum_of_entries(entries: Mapping[str, Any]) -> str:
    content = json.dumps(entries, sort_keys=True, separators=(",", ":"))
    return f"{extend_crc32c(content.encode('ascii')):08x}"


def digest_file(path: pathlib.Path) -> str:
    """Return the SHA-256 of a file, which unlike a checksum cannot be forged."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
