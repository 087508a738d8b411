"""Reads a whole checkpoint, or parts of it: the weights, the resume state, the small files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import IO, Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.content import CheckpointContent, CheckpointReading, TrialState
from det_lightning.checkpoint.format.layout import digest_file, find_damage, require_inside, require_unchanged
from det_lightning.checkpoint.format.lightning_file import TRIAL_KEY
from det_lightning.checkpoint.format.resume_state import ResumeState
from det_lightning.checkpoint.format.shards import (
    RESUME_ROOT,
    SHARDED_RESUME_VALUES,
    STATE_ROOT,
    StoredPart,
    index_files,
    map_tensors,
    part_files,
    read_indexes,
    require_tiling,
)
from det_lightning.checkpoint.safe_load.pickle_scanner import (
    Placeholder,
    holds_placeholder,
    put_placeholders,
    read_pickle,
)
from det_lightning.checkpoint.safe_load.safe_globals import ALLOWED, TENSORS
from det_lightning.checkpoint.safe_load.state_file import read_state, read_tensor_at
from det_lightning.checkpoint.storage.checkpoint_storage import open_checkpoint
from det_lightning.checkpoint.storage.location import Location, require_checkpoint_path
from det_lightning.escaping import get_logger
from det_lightning.masking import mask_url, short_text

logger = get_logger(__name__)

# The entries of state files that whoever wants weights and settings needs; they must hold no objects.
_NEEDED = ("models_state_dict", "model_state_dict", "state_dict", "settings", "load_data", "trial_state")
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
    has_metadata = (directory / layout.METADATA_FILE).exists()
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
        time_s=layout.as_time(layout.read_metadata(directory).get("time")),
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
    # Of a checkpoint that is deleted meanwhile, files that may be missing, such as the resume state, just seem to be.
    if has_metadata and not (directory / layout.METADATA_FILE).exists():
        raise errors.IncompleteCheckpointError(f"{directory} was deleted while it was read. Use another checkpoint.")
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

    Placeholders stand for objects in other entries; in a ``trusted`` file only if they cannot be created.
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


# Tensors of a sharded checkpoint, read part by part when a part is needed


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of the whole ``shape``, with parts in the files of a sharded checkpoint."""

    shape: torch.Size
    dtype: torch.dtype
    _name: str
    _directory: pathlib.Path
    _parts: Sequence[StoredPart]
    _trusted: bool

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def read(self) -> torch.Tensor:
        """Return the whole tensor, in main memory; raise a ``CheckpointError`` if a part cannot be read."""
        dim = self._parts[0].dim
        return self.read_rows(dim, 0, self.shape[dim])

    def read_rows(self, dim: int, begin: int, count: int) -> torch.Tensor:
        """Return ``count`` rows in a dimension, in main memory, from the parts with such rows only; see `read`."""
        if dim != self._parts[0].dim:
            return self.read().narrow(dim, begin, count).clone()
        try:
            rows = torch.empty([*self.shape[:dim], count, *self.shape[dim + 1 :]], dtype=self.dtype)
        except RuntimeError as e:  # torch has no specific error for this
            raise errors.CheckpointError(
                f"{self._name:.200}, a tensor of the shape {[*self.shape]}, does not fit into main memory: {e}"
            ) from e
        for part in self._parts:
            first = max(begin, part.begin)
            last = min(begin + count, part.begin + part.size)
            if first < last:
                stored = self._read_part(part).narrow(dim, first - part.begin, last - first)
                rows.narrow(dim, first - begin, last - first).copy_(stored)
        return rows

    def _read_part(self, part: StoredPart) -> torch.Tensor:
        path = self._directory / layout.SHARDS_DIR / part.file
        tensor = read_tensor_at(path, part.offset, part.length, trusted=self._trusted)
        expected = [*self.shape]
        expected[part.dim] = part.size
        if tensor.layout is not torch.strided or tensor.dtype is not self.dtype or [*tensor.shape] != expected:
            raise errors.IncompleteCheckpointError(
                f"{path} must hold {self._name:.200} at byte {part.offset:,}, in {self.dtype} and the shape "
                f"{expected}; got a tensor in {tensor.dtype} of the shape {[*tensor.shape]:}."
            )
        return tensor.detach()


def find_stored(directory: pathlib.Path, values: Any, name: str, *, trusted: bool) -> Any:
    """Return ``values`` with a :class:`StoredTensor` in place of each tensor that is stored in parts.

    ``name`` is the name of ``values``, such as ``"state"``. Raise an ``IncompleteCheckpointError`` if parts are
    missing.
    """
    parts = read_indexes(directory)

    def find(path: str, value: torch.Tensor) -> Any:
        if value.device.type != "meta" or path not in parts:
            return value
        in_order = require_tiling(parts[path], path, value)
        return StoredTensor(value.shape, value.dtype, path, directory, in_order, trusted)

    return map_tensors(values, find, name, torch.Tensor)


def find_parts(content: CheckpointContent, directory: pathlib.Path, *, trusted: bool) -> CheckpointContent:
    """Return the content of a sharded checkpoint with a :class:`StoredTensor` in place of each sharded tensor."""
    resume = content.resume
    if resume is not None:
        found = {name: getattr(resume, name) for name in SHARDED_RESUME_VALUES}
        resume = dataclasses.replace(resume, **find_stored(directory, found, RESUME_ROOT, trusted=trusted))
    state = find_stored(directory, content.state, STATE_ROOT, trusted=trusted)
    return dataclasses.replace(content, state=state, resume=resume, is_sharded=True)


def read_whole(values: Any) -> Any:
    """Return ``values``, nested dicts and lists, with a whole tensor in place of each :class:`StoredTensor`."""
    return map_tensors(values, lambda _, stored: stored.read(), "", StoredTensor)


def read_all_parts(content: CheckpointContent) -> CheckpointContent:
    """Return the content of a sharded checkpoint with whole tensors, in main memory, as if nothing were sharded."""
    resume = content.resume
    if resume is not None:
        whole = {name: read_whole(getattr(resume, name)) for name in SHARDED_RESUME_VALUES}
        resume = dataclasses.replace(resume, **whole)
    return dataclasses.replace(content, state=read_whole(content.state), resume=resume, is_sharded=False)
