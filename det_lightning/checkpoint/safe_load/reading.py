"""Reading a whole checkpoint, and parts of a checkpoint: the weights, the resume state, the small files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import pathlib
import pickle
import pickletools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import IO, Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.content import CheckpointContent, CheckpointReading, TrialState
from det_lightning.checkpoint.format.lightning_file import TRIAL_KEY
from det_lightning.checkpoint.format.manifest import digest_file, find_damage, require_inside, require_unchanged
from det_lightning.checkpoint.format.resume_state import ResumeState
from det_lightning.checkpoint.format.shards import (
    STATE_ROOT,
    index_files,
    part_files,
)
from det_lightning.checkpoint.safe_load.pickle_scanner import (
    Placeholder,
    UnsafeReference,
    holds_placeholder,
    put_placeholders,
)
from det_lightning.checkpoint.safe_load.safe_globals import ALLOWED, RANDOM_STATES, TENSORS, finish
from det_lightning.checkpoint.safe_load.state_file import read_state
from det_lightning.checkpoint.safe_load.stored_tensors import find_parts, find_stored, read_all_parts, read_whole
from det_lightning.checkpoint.storage.checkpoint_storage import open_checkpoint
from det_lightning.checkpoint.storage.location import Location, require_checkpoint_path
from det_lightning.escaping import get_logger
from det_lightning.masking import mask_url, short_text

logger = get_logger(__name__)

# The entries of state files that whoever wants weights and settings needs; they must hold no objects.
_NEEDED = ("models_state_dict", "model_state_dict", "state_dict", "settings", "load_data", "trial_state")
# A dict of a few numbers has some hundreds of bytes, the states of random generators some thousands.
_MAX_BYTES = 64 * 1024
# With these operations a few bytes describe keys that take years to hash, or whose hashing ends the process.
_NESTING = {"FROZENSET", "ADDITEMS", "DUP"}
# So do many tuples, or tuples that each occur twice; the pickle of random states refers back to a few values.
_TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_MAX_TUPLES = 1000
_REPEATING = {"GET", "BINGET", "LONG_BINGET"}
_MAX_REPEATED = 20
_KINDS: dict[str, tuple[Any, str]] = {
    "hparams": (dict | None, "an object"),
    "experiment_config": (dict | None, "an object"),
    "is_trainer": (bool | None, "true or false"),
    "trial_type": (str | None, "a string"),
    "trial_cls_spec": (str | None, "a string"),
}

#: Read a state file.
ReadFile = Callable[[pathlib.Path], dict[str, Any]]


def load_checkpoint(
    url: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    *,
    trusted: bool = False,
    in_parts: bool = False,
) -> CheckpointContent:
    """Read the checkpoint at a path or URL; see :func:`read_checkpoint`.

    Args:
        url: the checkpoint's own directory.
        options: see ``CheckpointStorage``.
        trusted: unpickle anything, and run any code that the files ask for.
        in_parts: see :func:`read_checkpoint`; downloaded files are kept as long as the content.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        StorageError: the storage cannot be read.
        IncompleteCheckpointError, UnsafeCheckpointError: see :func:`read_checkpoint`.

    Example:
        >>> from det_lightning.checkpoint import CheckpointContent, CheckpointStorage
        >>> from det_lightning.checkpoint import TrialState, load_checkpoint
        >>> storage = CheckpointStorage("checkpoints")
        >>> built_by = {"trial_cls_spec": "model_def:MyTrial", "hparams": {}, "experiment_config": {}}
        >>> content = CheckpointContent({}, TrialState(batches_trained=100), load_data=built_by)
        >>> _ = storage.write(content)
        >>> load_checkpoint(storage.newest()).trial_state.batches_trained
        100
    """
    return _load(url, CheckpointReading(trusted=trusted, storage_options=options or {}), in_parts=in_parts)


def load_newest(url: str, reading: CheckpointReading, *, only_weights: bool = False) -> CheckpointContent:
    """Read a checkpoint in parts, or the checkpoint before a damaged one; raise the first error if none can be read.

    For the arguments and exceptions, see :class:`CheckpointReading` and :func:`read_checkpoint`.
    """
    known = [*reading.newest_first]
    position = known.index(url) if url in known else len(known)
    failures: list[errors.CheckpointError] = []
    for candidate, before in itertools.pairwise([url, *known[position + 1 :], None]):
        assert candidate is not None
        try:
            # Before another checkpoint, damage must show before parts of a sharded checkpoint are used.
            verifies = before is not None
            return _load(candidate, reading, in_parts=True, verify_parts=verifies, only_weights=only_weights)
        except errors.CheckpointError as e:
            failures.append(e)
            if before is None or not _is_damaged(candidate, reading, e):
                break
            logger.warning(
                "Checkpoint %s is damaged: %s The run resumes from the checkpoint before, %s.",
                *(mask_url(url), e, mask_url(before)),
            )
    raise failures[0]


def _is_damaged(url: str, reading: CheckpointReading, error: errors.CheckpointError) -> bool:
    if isinstance(error, errors.UnsafeCheckpointError):
        # Flipped bits may look like a reference to code.
        with open_checkpoint(url, reading.storage_options) as directory:
            return bool(find_damage(directory))
    return isinstance(error, errors.IncompleteCheckpointError | errors.CheckpointNotFound)


def _load(url: str | os.PathLike[str], reading: CheckpointReading, **how: bool) -> CheckpointContent:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(open_checkpoint(url, reading.storage_options))
        content = _read(directory, reading, **how)
        # The files of both are read later.
        if content.is_sharded or (directory / layout.TENSORFLOW_FILE).is_file():
            content.kept = stack.pop_all()
    location = Location.parse(url, reading.storage_options)
    if not location.is_local:
        content.source = f"{location}/{pathlib.Path(content.source).relative_to(directory)}"
    return content


def read_checkpoint(
    directory: pathlib.Path, *, trusted: bool = False, in_parts: bool = False, only_weights: bool = False
) -> CheckpointContent:
    """Read the checkpoint in ``directory``, of any release since 0.12.

    Args:
        directory: a checkpoint's own directory.
        trusted: unpickle anything, and run any code that the files ask for.
        in_parts: do not read the parts of a sharded checkpoint; return a ``StoredTensor`` for each sharded tensor.
        only_weights: do not read objects outside of the weights and settings.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        IncompleteCheckpointError: the checkpoint is incomplete or damaged.
        UnsafeCheckpointError: the checkpoint refers to code and is not ``trusted``.

    Example:
        >>> from pathlib import Path
        >>> import det_lightning as det
        >>> from det_lightning.checkpoint import CheckpointStorage, read_checkpoint
        >>> from model_def import MyTrial
        >>> with det.pytorch.init(hparams={"lr": 0.01, "global_batch_size": 8}) as context:
        ...     det.pytorch.Trainer(MyTrial(context), context).fit(
        ...         max_length=det.pytorch.Batch(2), checkpoint_storage="checkpoints"
        ...     )
        >>> content = read_checkpoint(Path(CheckpointStorage("checkpoints").newest()))
        >>> content.trial_state.batches_trained
        2
    """
    if not isinstance(directory, os.PathLike):
        require_checkpoint_path(directory)
        directory = pathlib.Path(directory)  # callers without type checks pass text
    return _read(directory, CheckpointReading(trusted=trusted), in_parts=in_parts, only_weights=only_weights)


def _read(
    directory: pathlib.Path,
    reading: CheckpointReading,
    *,
    in_parts: bool,
    verify_parts: bool = False,
    only_weights: bool = False,
) -> CheckpointContent:
    """Read a checkpoint; with ``verify_parts``, compare parts left for later with their checksums."""
    trusted = reading.trusted
    require_inside(directory)
    layout.require_complete(directory)
    state_file = layout.find_state_file(directory)
    read: ReadFile = functools.partial(read_weights if only_weights else read_state, trusted=trusted)
    if reading.recorded:
        read = functools.partial(read_known_state, trusted=trusted, recorded=reading.recorded)
    trial_state, epochs_known = read_trial_state(directory, trusted=trusted)
    state = read_state_file(state_file, read)
    lightning = directory / layout.LIGHTNING_FILE
    content = CheckpointContent(
        state=state,
        trial_state=trial_state,
        resume=read_resume(directory, read),
        lightning=read(lightning) if lightning.is_file() else None,
        load_data=read_load_data(directory),
        epochs_known=epochs_known,
        name=directory.name,
        source=str(state_file),
        directory=directory,
    )
    names: Sequence[str] = layout.FILES_READ
    if layout.is_sharded(directory, state_file):
        content = find_parts(content, directory, trusted=trusted)
        content = content if in_parts else read_all_parts(content)
        names = [*names, *index_files(directory), *(part_files(directory) if verify_parts else [])]
    if (directory / layout.TENSORFLOW_FILE).is_file():
        names = [*names, *layout.find_files_of_tensorflow(directory)]
    # Last, because a replaced file may be unsafe, which the readers report.
    if not trusted:
        require_unchanged(directory, names)
    elif damage := find_damage(directory, names):
        differences = "; ".join(damage)
        logger.warning("The trusted checkpoint %s differs from its manifest: %s.", directory, differences)
    return content


def read_state_file(state_file: pathlib.Path, read: ReadFile) -> dict[str, Any]:
    """Return the state in a file of a checkpoint; TensorFlow's file of an Estimator stands for an empty state."""
    if state_file.name == layout.TENSORFLOW_FILE:
        return {"models_state_dict": [], "optimizers_state_dict": [], "lr_schedulers_state_dict": []}
    return read(state_file)


def read_models(
    directory: pathlib.Path, *, trusted: bool = False, **torch_load_kwargs: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return the state of a checkpoint with the weights of all models, and the paths of the files read.

    In a sharded checkpoint the other sharded tensors are not read, and nowhere are objects read beside the weights. For
    the arguments and exceptions, see :func:`read_state`.
    """
    state_file = layout.find_state_file(directory)
    if state_file.name == layout.TENSORFLOW_FILE:
        raise errors.InvalidCheckpointException(
            f"{directory} is a checkpoint of an EstimatorTrial, without weights of torch; train or evaluate "
            "that trial with det_lightning.estimator."
        )
    state = read_weights(state_file, trusted=trusted, **torch_load_kwargs)
    names = [state_file.relative_to(directory).as_posix()]
    if layout.is_sharded(directory, state_file):
        state = find_stored(directory, state, STATE_ROOT, trusted=trusted)
        state["models_state_dict"] = read_whole(state.get("models_state_dict"))
        names += index_files(directory)
    return state, names


def read_resume(directory: pathlib.Path, read: ReadFile) -> ResumeState | None:
    """Read the resume state of the checkpoint in ``directory``; return None if Determined wrote the checkpoint."""
    path = directory / layout.RESUME_FILE
    return ResumeState.from_dict(read(path), str(path)) if path.is_file() else None


def read_weights(path: pathlib.Path | IO[bytes], *, trusted: bool = False, **arguments: Any) -> dict[str, Any]:
    """Read a state file for weights and settings, with the arguments of ``read_state``.

    Placeholders stand for objects in other entries, or for all objects there if a ``trusted`` file's cannot be made.
    Objects among the weights raise the errors of ``read_state``.
    """
    try:
        return read_state(path, trusted=trusted, **arguments)
    except errors.CheckpointError as refused:
        if not (trusted or isinstance(refused, errors.UnsafeCheckpointError)):
            raise
        state = _read_with_placeholders(path, ALLOWED, arguments) or _read_with_placeholders(path, TENSORS, arguments)
        if state is None:
            raise refused from None
        entry = state.get(TRIAL_KEY)  # a .ckpt file has the settings in there
        inner = [entry.get(name) for name in ("resume", "extra")] if isinstance(entry, dict) else []
        parts = [part for part in (state, entry, *inner) if isinstance(part, dict)]
        if any(holds_placeholder(part.get(name)) for part in parts for name in _NEEDED):
            raise
        return state


def _read_with_placeholders(
    path: pathlib.Path | IO[bytes], kept: Container[str], arguments: dict[str, Any]
) -> dict[str, Any] | None:
    """Read a state file with placeholders for all names but those ``kept``; return None if the rest cannot be read."""
    prepare = functools.partial(put_placeholders, kept=kept)
    with torch.serialization.safe_globals([Placeholder]), contextlib.suppress(errors.CheckpointError):
        return read_state(path, prepare=prepare, **arguments)
    return None


def read_known_state(path: pathlib.Path, *, trusted: bool = False, recorded: Collection[str] = ()) -> dict[str, Any]:
    """Read a state file as ``read_state`` does; trust a refused file if ``recorded`` holds the file's SHA-256.

    An experiment records the SHA-256 when its trial writes a file, and so may trust the same bytes later.
    """
    try:
        return read_state(path, trusted=trusted)
    except errors.CheckpointError:
        if not recorded or digest_file(path) not in recorded:
            raise
        # Nobody else can change the copy after its digest is known.
        with tempfile.TemporaryDirectory(prefix="det_lightning-") as folder:
            copy = pathlib.Path(shutil.copy(path, folder))
            if digest_file(copy) not in recorded:
                raise
            logger.info("The objects in %s are read, because the file is as this trial wrote it.", path)
            return read_state(copy, trusted=True, name=path)


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, known: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._known = known

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in self._known:
            raise UnsafeReference(name)
        found = self._known[name]
        # A file can set attributes of whatever it names: of a function of its own, or of a class, which refuses them.
        return found if isinstance(found, type) else functools.partial(found)


def _require_small(content: bytes) -> None:
    """Raise if loading a pickle could take too much memory or time, or end the process."""
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it has {len(content):,} bytes")
    names = Counter[str]()
    for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
        # The unpickler allocates memory for all memo numbers up to the one used.
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > number:
            raise ValueError(f"it numbers its values up to {argument:,}")
        names[operation.name] += 1
    is_nested = sum(names[name] for name in _TUPLES) > _MAX_TUPLES or names.keys() & _NESTING
    if is_nested or sum(names[name] for name in _REPEATING) > _MAX_REPEATED:
        raise ValueError("it holds more than numbers and names")


def read_trial_state(directory: pathlib.Path, *, trusted: bool = False) -> tuple[TrialState, bool]:
    """Return the progress of a checkpoint's trial, and whether the number of epochs is known.

    Older releases' ``workload_sequencer.pkl`` has no number of epochs; a checkpoint with neither file has no progress.
    """
    for name in (layout.TRIAL_STATE_FILE, layout.WORKLOAD_FILE):
        path = directory / name
        if path.is_file():
            values = read_pickle(path, trusted=trusted)
            return _check_state(values, path), "epochs_trained" in values
    return TrialState(), False


def read_pickle(path: pathlib.Path, *, trusted: bool = False, with_arrays: bool = False) -> dict[str, Any]:
    """Read a pickled dict of containers, numbers and strings; with ``with_arrays`` also of numpy arrays.

    Raises:
        UnsafeCheckpointError: the file refers to anything else, and is not ``trusted``.
        IncompleteCheckpointError: the file is damaged, would take too much memory or time, or holds no dict.
    """
    content = layout.read_bytes(path)
    try:
        if trusted:
            values = pickle.loads(content)
        else:
            _require_small(content)
            values = finish(_Unpickler(content, RANDOM_STATES if with_arrays else {}).load())
    except UnsafeReference as e:
        raise errors.UnsafeCheckpointError(
            f"{path} refers to {e.args[0]:.200}, so reading the file could run code. If you know where "
            "the file comes from, pass trusted=True."
        ) from e
    except Exception as e:  # unpickling damaged bytes may raise anything
        raise errors.IncompleteCheckpointError(f"{path} cannot be read and may be damaged: {e}") from e
    if not isinstance(values, dict):
        raise errors.IncompleteCheckpointError(f"{path} must hold a dict; got a {type(values).__name__}.")
    return values


def _check_state(values: dict[str, Any], path: pathlib.Path) -> TrialState:
    names = [field.name for field in dataclasses.fields(TrialState)]
    if values.keys().isdisjoint([*names, "steps_completed"]):
        raise errors.IncompleteCheckpointError(
            f"{path} must hold {', '.join(names)}; got {short_text(sorted(map(short_text, values)))}. The file is "
            "damaged, or another kind of file."
        )
    # Older releases have "steps_completed" instead, or before 0.18 "latest_batch"; their other fields are not used.
    values = {"batches_trained": values.get("steps_completed", values.get("latest_batch")), **values}
    known = {name: 0 if values.get(name) is None else values[name] for name in names}
    wrong = layout.find_wrong_counts(known)
    if wrong is not None:
        raise errors.IncompleteCheckpointError(f"{path} {wrong}.")
    return TrialState(**known)


def read_load_data(directory: pathlib.Path) -> dict[str, Any]:
    """Return how to rebuild the trial of the checkpoint in ``directory``, in the form of ``load_data.json``.

    ``trial_cls_spec`` is the trial's class as ``"module:QualName"``. Releases since 0.17.8 write ``load_data.json``;
    for older ones, the platform's download added the entries to ``metadata.json``.
    """
    path = directory / layout.LOAD_DATA_FILE
    if path.is_file():
        found = content = layout.read_json(path)
        if content.get("trial_type") == "EstimatorTrial":  # Determined writes nothing else about it
            found = content = {**layout.make_load_data(None, None, is_trainer=False), **content}
        missing = [name for name in ("hparams", "experiment_config", "trial_cls_spec") if name not in content]
        if missing:
            raise errors.IncompleteCheckpointError(
                f"{path} lacks {', '.join(missing)}; got {', '.join(sorted(content)):.300}."
            )
    else:
        path = directory / layout.METADATA_FILE
        found = layout.read_json(path) if path.is_file() else {}
        config = found.get("experiment_config")
        spec = config.get("entrypoint") if isinstance(config, dict) else None
        content = layout.make_load_data(found.get("hparams"), config, spec, is_trainer=False)
    found = {**found, "trial_cls_spec": content["trial_cls_spec"]}
    wrong = [
        f"{name!r} must be {expected}; got a {type(found[name]).__name__}"
        for name, (kind, expected) in _KINDS.items()
        if not isinstance(found.get(name), kind)
    ]
    if wrong:
        raise errors.IncompleteCheckpointError(f"{path}: {'; '.join(wrong)}.")
    return content
