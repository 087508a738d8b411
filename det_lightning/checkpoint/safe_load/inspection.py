"""Inspects a checkpoint without building its trial, and verifies that nothing is damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.layout import require_inside
from det_lightning.checkpoint.format.resume_state import ResumeState, read_settings
from det_lightning.checkpoint.safe_load.reading import (
    ReadFile,
    read_checkpoint,
    read_load_data,
    read_resume,
    read_state_file,
    read_trial_state,
)
from det_lightning.checkpoint.safe_load.state_file import read_state
from det_lightning.escaping import escape
from det_lightning.masking import mask_settings


@dataclasses.dataclass
class Verdict:
    """The number of files in a checkpoint, of checksums in ``metadata.json``, and a sentence for each problem.

    Determined's own checkpoints have no checksums.
    """

    files: int
    checksums: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def verify_checkpoint(directory: pathlib.Path, *, trusted: bool = False) -> Verdict:
    """Find all missing, changed, damaged and unsafe files of a checkpoint, including ``code/``."""
    verdict = Verdict(sum(path.is_file() for path in directory.rglob("*")))
    attempt = functools.partial(_attempt, verdict.problems)
    read = functools.partial(read_state, trusted=trusted)
    attempt(lambda: require_inside(directory))
    if verdict.problems:  # no other file is trusted to be there
        return verdict
    attempt(lambda: layout.require_complete(directory))
    attempt(lambda: _compare_checksums(directory, verdict))
    attempt(lambda: read_load_data(directory))
    attempt(lambda: read_trial_state(directory, trusted=trusted))
    state_file = _find_state_file(directory)
    if state_file is not None:
        attempt(lambda: read_state_file(state_file, read))
        if layout.is_sharded(directory, state_file):
            attempt(lambda: read_checkpoint(directory, trusted=trusted))
    attempt(lambda: read_resume(directory, read))
    attempt(lambda: _has_lightning(directory, read))
    return verdict


def _find_state_file(directory: pathlib.Path) -> pathlib.Path | None:
    """Return the file with the weights; None if there is none, an error that ``require_complete`` reports."""
    with contextlib.suppress(errors.CheckpointNotFound, errors.InvalidCheckpointException):
        return layout.find_state_file(directory)
    return None


def _attempt(problems: list[str], read: Callable[[], Any]) -> Any:
    """Return the result of ``read``; if it fails, return None and note the problem once."""
    try:
        return read()
    except errors.CheckpointError as e:
        if str(e) not in problems:
            problems.append(str(e))
        return None


def _compare_checksums(directory: pathlib.Path, verdict: Verdict) -> None:
    verdict.problems += map(escape, layout.find_damage(directory))
    verdict.problems += [
        f"{escape(directory / name)} is not listed in {layout.METADATA_FILE}: it was added later"
        for name in layout.find_unlisted(directory)
    ]
    verdict.checksums = len(layout.read_metadata(directory).get(layout.MANIFEST_KEY, {}))


_RNG_NAMES = {
    "cpu_rng_state": "torch",
    "gpu_rng_state": "torch on the GPU",
    "np_rng_state": "numpy",
    "random_rng_state": "random",
}


def inspect_checkpoint(directory: pathlib.Path, *, trusted: bool = False) -> dict[str, Any]:
    """Return the content of a checkpoint as JSON values, as far as the files can be read, with secrets masked.

    ``problems`` has a sentence for each unreadable entry. Without problems, all entries exist: ``metadata``,
    ``load_data``, ``hparams``, ``experiment_config``, ``trial_state``, ``models`` (with a list ``tensors`` each),
    ``optimizers``, ``lr_schedulers``, ``callbacks``, ``rng_states``, ``gradient_scaler``, ``exact_resume``,
    ``lightning``.
    """
    problems: list[str] = []
    found: dict[str, Any] = {"problems": problems}
    read_file = functools.partial(read_state, trusted=trusted)
    reads: tuple[Callable[[], dict[str, Any]], ...] = (
        lambda: {"complete": _is_complete(directory)},
        lambda: {"metadata": _inspect_metadata(directory)},
        lambda: {"load_data": mask_settings(read_load_data(directory))},
        lambda: {"trial_state": _inspect_trial_state(directory, trusted)},
        lambda: _inspect_state(directory, read_file),
        lambda: _inspect_resume(read_resume(directory, read_file), found.get("load_data")),
        lambda: {"lightning": _has_lightning(directory, read_file)},
    )
    _attempt(problems, lambda: require_inside(directory))
    for read in reads if not problems else ():
        found.update(_attempt(problems, read) or {})
    return found


def _is_complete(directory: pathlib.Path) -> bool:
    layout.require_complete(directory)
    return True


def _inspect_metadata(directory: pathlib.Path) -> Any:
    metadata = layout.read_metadata(directory)
    if (damage := layout.find_metadata_damage(metadata)) is not None:
        raise errors.IncompleteCheckpointError(f"{directory} is damaged: {damage}.")
    hidden = (layout.MANIFEST_KEY, layout.CHECKSUM_KEY)
    return mask_settings({name: value for name, value in metadata.items() if name not in hidden})


def _inspect_trial_state(directory: pathlib.Path, trusted: bool) -> dict[str, Any]:
    state, epochs_known = read_trial_state(directory, trusted=trusted)
    return {**vars(state), **({} if epochs_known else {"epochs_trained": None})}


def _inspect_resume(resume: ResumeState | None, load_data: dict[str, Any] | None) -> dict[str, Any]:
    return {"exact_resume": resume is not None, **mask_settings(read_settings(resume, load_data))}


def _has_lightning(directory: pathlib.Path, read: ReadFile) -> bool:
    path = directory / layout.LIGHTNING_FILE
    return path.is_file() and read(path) is not None


def _inspect_state(directory: pathlib.Path, read: ReadFile) -> dict[str, Any]:
    path = _find_state_file(directory)
    if path is None:
        return {}
    state = read_state_file(path, read)
    layout.modernize(state, str(path))
    return {
        "models": [_describe_model(weights) for weights in _list_dicts(state, "models_state_dict")],
        "optimizers": [
            {"groups": len(groups), "lr": [_find_number(group.get("lr")) for group in groups]}
            for groups in (_list_dicts(one, "param_groups") for one in _list_dicts(state, "optimizers_state_dict"))
        ],
        "lr_schedulers": [
            {"last_epoch": _find_number(one.get("last_epoch")), "lr": [*map(_find_number, one.get("_last_lr") or [])]}
            for one in _list_dicts(state, "lr_schedulers_state_dict")
        ],
        "callbacks": sorted(map(str, state.get("callbacks") or {})),
        "rng_states": [_RNG_NAMES.get(str(name), str(name)) for name in state.get("rng_state") or {}],
        "gradient_scaler": "scaler_state_dict" in state,
    }


def _list_dicts(state: Mapping[Any, Any], key: str) -> list[dict[Any, Any]]:
    return [one for one in state.get(key) or [] if isinstance(one, dict)]


def _describe_model(weights: Mapping[Any, Any]) -> dict[str, Any]:
    values: Counter[str] = Counter()
    tensors = []
    for name, tensor in weights.items():
        if isinstance(tensor, torch.Tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            values[dtype] += tensor.numel()
            tensors.append({"name": str(name), "shape": list(tensor.shape), "dtype": dtype})
    return {
        "values": values.total(),
        "dtypes": dict(values),
        "tensors": tensors,
        "other_entries": sorted(str(name) for name, value in weights.items() if not isinstance(value, torch.Tensor)),
    }


def _find_number(value: Any) -> float | None:
    """Return a learning rate or count, which may be a tensor; None for anything but a number."""
    try:
        if isinstance(value, torch.Tensor):
            value = value.item()
        float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return value if isinstance(value, int | float) else None
