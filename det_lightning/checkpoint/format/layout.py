"""The names of a checkpoint's files, the rules for a complete checkpoint, and the conversion of older layouts.

Determined 0.38 writes ``state_dict.pth``, ``trial_state.pkl``, ``load_data.json``, ``code/`` and, last of all,
``metadata.json``. det_lightning adds ``resume.pth``, with the rest of the state for an exact resume, and a manifest in
``metadata.json``; Determined ignores both. A sharded checkpoint has ``shards/`` in place of ``state_dict.pth``, and
Determined cannot read the shards; see ``det_lightning/checkpoint/format/shards.py``.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Container, Iterable, Mapping
from typing import Any

from det_lightning import errors
from det_lightning.files.strict_json import MAX_DEPTH, MAX_SMALL_FILE_BYTES, is_shallow
from det_lightning.masking import short_text

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
    """Return whether ``metadata.json`` fits a script of the Core API, provided that there is no ``load_data.json``."""
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
    """Describe the values that should be counts, as in a ``TrialState``, and are not; None if all are."""
    wrong = {name: value for name, value in counts.items() if type(value) is not int or not 0 <= value <= MAX_COUNT}
    if not wrong:
        return None
    return f"must hold counts, which are integers from 0 to {MAX_COUNT}; got {short_text(wrong)}"


# Up to 0.12.12 a trial had one model, one optimizer and one scheduler, and no lists of them.
_SINGLE_KEYS = {
    "model_state_dict": "models_state_dict",
    "optimizer_state_dict": "optimizers_state_dict",
    "lr_scheduler": "lr_schedulers_state_dict",
}


def modernize(state: dict[str, Any], source: str) -> None:
    """Convert the keys of an older release's state to today's, in place."""
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
