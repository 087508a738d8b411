"""Reading a whole checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import os
import pathlib
import pickle
import pickletools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.content import CheckpointContent, TrialState
from det_lightning.checkpoint.format.load_data import read_load_data
from det_lightning.checkpoint.format.manifest import find_damage, require_inside, require_unchanged
from det_lightning.checkpoint.format.resume_state import ResumeState
from det_lightning.checkpoint.format.shards import (
    RESUME_ROOT,
    SHARDED_RESUME_VALUES,
    STATE_ROOT,
    index_files,
    part_files,
)
from det_lightning.checkpoint.safe_load.pickles import UnsafeReference
from det_lightning.checkpoint.safe_load.placeholders import read_weights
from det_lightning.checkpoint.safe_load.stand_ins import RANDOM_STATES, finish
from det_lightning.checkpoint.safe_load.state_file import read_known_state, read_state, warn_of_nan
from det_lightning.checkpoint.safe_load.stored_tensors import find_stored, read_all_parts, read_whole
from det_lightning.checkpoint.storage.location import Location
from det_lightning.checkpoint.storage.transfer import open_checkpoint
from det_lightning.checkpoint.storage.wrong_places import require_checkpoint_path
from det_lightning.escaping import escape
from det_lightning.masking import short_text

logger = logging.getLogger(__name__)

# A dict of a few numbers has some hundreds of bytes, the states of random generators some thousands.
_MAX_BYTES = 64 * 1024
# With these operations a few bytes describe keys that take years to hash, or whose hashing ends the process.
_TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_NESTING = {"FROZENSET", "ADDITEMS", "DUP"}
_MAX_TUPLES = 1000
# So do tuples of tuples that each occur twice; the pickle of random states refers back to a few values.
_REPEATING = {"GET", "BINGET", "LONG_BINGET"}
_MAX_REPEATED = 20
# The unpickler itself stops at the first of these operations, unless it knows numpy's names.
_REFERRING = {"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}

# Reads a state file.
_Read = Callable[[pathlib.Path], dict[str, Any]]


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


def _require_small(content: bytes, with_arrays: bool) -> None:
    """Raise if loading a pickle could take too much memory or time, or end the process."""
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it has {len(content):,} bytes")
    names = Counter[str]()
    for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if operation.name in _REFERRING and not with_arrays:
            break
        # The unpickler allocates memory for all memo numbers up to the one used.
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > number:
            raise ValueError(f"it numbers its values up to {argument:,}")
        names[operation.name] += 1
    tuples = sum(names[name] for name in _TUPLES)
    repeated = sum(names[name] for name in _REPEATING)
    is_nested = tuples > _MAX_TUPLES or repeated > _MAX_REPEATED if with_arrays else tuples > 0
    if is_nested or names.keys() & _NESTING:
        raise ValueError("it holds more than numbers and names")


def read_trial_state(directory: pathlib.Path, *, trusted: bool = False) -> tuple[TrialState, bool]:
    """Return the progress of a checkpoint's trial, and whether its ``epochs_trained`` is known.

    Older releases' ``workload_sequencer.pkl`` does not hold it; a checkpoint with neither file has no progress.
    """
    for name in (layout.TRIAL_STATE_FILE, layout.WORKLOAD_FILE):
        path = directory / name
        if path.is_file():
            values = read_pickle(path, trusted=trusted)
            return _checked(values, path), "epochs_trained" in values
    return TrialState(), False


def read_pickle(path: pathlib.Path, *, trusted: bool = False, with_arrays: bool = False) -> dict[str, Any]:
    """Read a pickled dict of containers, numbers and strings, and with ``with_arrays`` also numpy arrays.

    Raises:
        UnsafeCheckpointError: it refers to anything else, and is not ``trusted``.
        IncompleteCheckpointError: it is damaged, would take too much memory or time, or is not a dict.
    """
    content = layout.read_bytes(path)
    try:
        if trusted:
            values = pickle.loads(content)
        else:
            _require_small(content, with_arrays)
            values = finish(_Unpickler(content, RANDOM_STATES if with_arrays else {}).load())
    except UnsafeReference as e:
        raise errors.UnsafeCheckpointError(
            f"{escape(path)} refers to {escape(e.args[0]):.200}, and reading that could run code. If you know where "
            "the file comes from, pass trusted=True."
        ) from e
    except Exception as e:  # unpickling damaged bytes may raise anything
        raise errors.IncompleteCheckpointError(f"{path} cannot be read, it may be damaged: {e}") from e
    if not isinstance(values, dict):
        raise errors.IncompleteCheckpointError(f"{path} should hold a dict; it holds a {type(values).__name__}.")
    return values


def _checked(values: dict[str, Any], path: pathlib.Path) -> TrialState:
    names = [field.name for field in dataclasses.fields(TrialState)]
    if values.keys().isdisjoint([*names, "steps_completed"]):
        raise errors.IncompleteCheckpointError(
            f"{path} should hold {', '.join(names)}; it has {short_text(sorted(map(short_text, values)))}. It is "
            "damaged, or the file of something else."
        )
    # Older releases have "steps_completed" instead, or before 0.18 "latest_batch"; their other fields are not used.
    values = {"batches_trained": values.get("steps_completed", values.get("latest_batch")), **values}
    known = {name: 0 if values.get(name) is None else values[name] for name in names}
    wrong = layout.find_wrong_counts(known)
    if wrong is not None:
        raise errors.IncompleteCheckpointError(f"{path} {wrong}.")
    return TrialState(**known)


def load_checkpoint(
    url: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    *,
    trusted: bool = False,
    in_parts: bool = False,
    verify_parts: bool = False,
    recorded: Collection[str] = (),
    only_weights: bool = False,
) -> CheckpointContent:
    """Read the checkpoint at a path or URL; see :func:`read_checkpoint`.

    Args:
        url: the checkpoint's own directory.
        options: see ``CheckpointStorage``.
        trusted: unpickle anything, and run any code that the files ask for.
        in_parts: see :func:`read_checkpoint`; downloaded files are kept as long as the content is.
        verify_parts: see :func:`read_checkpoint`.
        recorded: see :func:`read_checkpoint`.
        only_weights: see :func:`read_checkpoint`.

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
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(open_checkpoint(url, options))
        content = read_checkpoint(
            directory,
            trusted=trusted,
            in_parts=in_parts,
            verify_parts=verify_parts,
            recorded=recorded,
            only_weights=only_weights,
        )
        # The files of both are read later.
        if content.is_sharded or (directory / layout.TENSORFLOW_FILE).is_file():
            content.kept = stack.pop_all()
    location = Location.parse(url, options)
    if location.is_local:
        return content
    return dataclasses.replace(content, source=f"{location}/{pathlib.Path(content.source).relative_to(directory)}")


def read_checkpoint(
    directory: pathlib.Path,
    *,
    trusted: bool = False,
    in_parts: bool = False,
    verify_parts: bool = False,
    recorded: Collection[str] = (),
    only_weights: bool = False,
) -> CheckpointContent:
    """Read the checkpoint in ``directory``, of any release since 0.12.

    Args:
        directory: a checkpoint's own directory.
        trusted: unpickle anything, and run any code that the files ask for.
        in_parts: do not read the parts of a sharded checkpoint; return a ``StoredTensor`` for each sharded tensor.
        verify_parts: compare the parts of a sharded checkpoint with their checksums, which reads all of them.
        recorded: SHA-256 of state files that are trusted, since the caller recorded them when they were written.
        only_weights: only the weights and settings are wanted: objects elsewhere do not matter, and are not read.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        IncompleteCheckpointError: it was not written completely, or is damaged.
        UnsafeCheckpointError: it refers to code and is not ``trusted``.

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
    require_inside(directory)
    layout.require_complete(directory)
    state_file = layout.find_state_file(directory)
    read: _Read = functools.partial(read_weights if only_weights else read_state, trusted=trusted)
    if recorded:
        read = functools.partial(read_known_state, trusted=trusted, recorded=recorded)
    trial_state, epochs_known = read_trial_state(directory, trusted=trusted)
    state = read_state_file(state_file, read)
    warn_of_nan(state, str(state_file))
    lightning = directory / layout.LIGHTNING_FILE
    content = CheckpointContent(
        state=state,
        trial_state=trial_state,
        resume=_read_resume(directory, read),
        lightning=read(lightning) if lightning.is_file() else None,
        load_data=read_load_data(directory),
        epochs_known=epochs_known,
        name=directory.name,
        source=str(state_file),
        directory=directory,
    )
    names: Sequence[str] = layout.FILES_READ
    if layout.is_sharded(directory, state_file):
        content = _with_stored(content, directory, trusted)
        content = content if in_parts else read_all_parts(content)
        names = [*names, *index_files(directory), *(part_files(directory) if verify_parts else [])]
    if (directory / layout.TENSORFLOW_FILE).is_file():
        names = [*names, *layout.find_files_of_tensorflow(directory)]
    # Last, because a replaced file may be unsafe, which the readers report.
    if not trusted:
        require_unchanged(directory, names)
    elif damage := find_damage(directory, names):
        differences = escape("; ".join(damage))
        logger.warning("The trusted checkpoint %s differs from its manifest: %s.", escape(directory), differences)
    return content


def read_state_file(state_file: pathlib.Path, read: _Read | None = None, *, trusted: bool = False) -> dict[str, Any]:
    """Return the state in a file of a checkpoint, as ``read`` reads it, by default ``read_state``.

    TensorFlow's file of an Estimator stands for an empty state.
    """
    if state_file.name == layout.TENSORFLOW_FILE:
        return {"models_state_dict": [], "optimizers_state_dict": [], "lr_schedulers_state_dict": []}
    return read_state(state_file, trusted=trusted) if read is None else read(state_file)


def _with_stored(content: CheckpointContent, directory: pathlib.Path, trusted: bool) -> CheckpointContent:
    resume = content.resume
    if resume is not None:
        found = {name: getattr(resume, name) for name in SHARDED_RESUME_VALUES}
        resume = dataclasses.replace(resume, **find_stored(directory, found, RESUME_ROOT, trusted=trusted))
    state = find_stored(directory, content.state, STATE_ROOT, trusted=trusted)
    return dataclasses.replace(content, state=state, resume=resume, is_sharded=True)


def read_models(
    directory: pathlib.Path, *, trusted: bool = False, **torch_load_kwargs: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return the state of a checkpoint with the weights of its models, and the paths of the files that were read.

    In a sharded checkpoint the other sharded tensors are not read, and objects elsewhere are not read at all. For the
    arguments and exceptions, see :func:`read_state`.
    """
    state_file = layout.find_state_file(directory)
    if state_file.name == layout.TENSORFLOW_FILE:
        raise errors.InvalidCheckpointException(
            f"{escape(directory)} is a checkpoint of an EstimatorTrial, without weights of torch; train or evaluate "
            "that trial with det_lightning.estimator."
        )
    state = read_weights(state_file, trusted=trusted, **torch_load_kwargs)
    names = [state_file.relative_to(directory).as_posix()]
    if layout.is_sharded(directory, state_file):
        state = find_stored(directory, state, STATE_ROOT, trusted=trusted)
        state["models_state_dict"] = read_whole(state.get("models_state_dict"))
        names += index_files(directory)
    return state, names


def read_resume(directory: pathlib.Path, *, trusted: bool = False, only_settings: bool = False) -> ResumeState | None:
    """Read the resume state of the checkpoint in ``directory``; return None if Determined wrote the checkpoint.

    With ``only_settings``, objects elsewhere are not read.
    """
    return _read_resume(directory, functools.partial(read_weights if only_settings else read_state, trusted=trusted))


def _read_resume(directory: pathlib.Path, read: _Read) -> ResumeState | None:
    path = directory / layout.RESUME_FILE
    return ResumeState.from_dict(read(path), str(path)) if path.is_file() else None
