"""Conversion between Determined's checkpoints, Lightning's ``.ckpt`` files and plain weights. Needs no Lightning.

:func:`from_lightning` reverses :func:`to_lightning` without loss.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.content import CheckpointContent, TrialState
from det_lightning.checkpoint.format.layout import find_wrong_counts, make_load_data, modernize
from det_lightning.checkpoint.format.resume_state import ResumeState, read_settings
from det_lightning.checkpoint.format.standard_values import with_own_types, with_plain_numbers, with_plain_values
from det_lightning.masking import mask_settings, short_text

_MODEL_NAME = re.compile(r"models\.(\d{1,6})(?:\.(.*))?", re.DOTALL)


def join_models(models: list[dict[str, Any]]) -> OrderedDict[str, Any]:
    """Join the state dicts of all models into the state dict of a TrialModule, with names ``models.<index>.<name>``."""
    joined: OrderedDict[str, Any] = OrderedDict()
    versions: OrderedDict[str, Any] = OrderedDict({"": {"version": 1}, "models": {"version": 1}})
    for index, weights in enumerate(models):
        prefix = f"models.{index}."
        joined.update({f"{prefix}{name}": value for name, value in weights.items()})
        own = _read_versions(weights) or {"": {"version": 1}}
        versions.update({f"{prefix}{name}".removesuffix("."): version for name, version in own.items()})
    _set_versions(joined, versions)
    return joined


def split_models(joined: Mapping[str, Any]) -> tuple[list[OrderedDict[str, Any]], dict[str, Any]]:
    """Split the state dict of a TrialModule into the state dicts of the models, and the entries of no model."""
    values: dict[int, OrderedDict[str, Any]] = {}
    versions: dict[int, OrderedDict[str, Any]] = {}
    rest = {}
    for name, value in joined.items():
        match = _MODEL_NAME.fullmatch(str(name))
        if match is None or match[2] is None:
            rest[name] = value
        else:
            values.setdefault(int(match[1]), OrderedDict())[match[2]] = value
    for name, version in _read_versions(joined).items():
        if (match := _MODEL_NAME.fullmatch(str(name))) is not None:
            # A model without tensors has only a version.
            values.setdefault(int(match[1]), OrderedDict())
            versions.setdefault(int(match[1]), OrderedDict())[match[2] or ""] = version
    if sorted(values) != list(range(len(values))):
        raise errors.InvalidCheckpointException(
            f"The models of a TrialModule must be numbered from 0 without gaps; got {sorted(values)!s:.200}."
        )
    for index, weights in values.items():
        _set_versions(weights, versions.get(index, OrderedDict()))
    return [values[index] for index in range(len(values))], rest


def _read_versions(weights: Any) -> Mapping[str, Any]:
    versions = getattr(weights, "_metadata", None)
    return versions if isinstance(versions, Mapping) else {}


def _set_versions(weights: OrderedDict[str, Any], versions: OrderedDict[str, Any]) -> None:
    if versions:
        weights._metadata = versions  # type: ignore[attr-defined]  # where torch looks for it


#: The entry of a TrialModule's own state in Lightning's checkpoint files.
TRIAL_KEY = "det_lightning"

_MODELS = "models_state_dict"
_OPTIMIZERS = "optimizers_state_dict"
_SCHEDULERS = "lr_schedulers_state_dict"


def to_lightning(content: CheckpointContent) -> dict[str, Any]:
    """Return the content of a ``.ckpt`` file that ``pl.Trainer.fit(TrialModule(...), ckpt_path=...)`` resumes."""
    state = _modernize_state(content)
    models = state.pop(_MODELS)
    optimizers = state.pop(_OPTIMIZERS)
    resume = _mask_settings(content.resume)
    load_data = None if content.load_data is None else mask_settings(content.load_data)
    hparams = mask_settings(read_settings(resume, load_data))["hparams"]
    batches = content.trial_state.batches_trained
    lightning = dict(content.lightning or {})
    weights = join_models(models)
    weights.update(lightning.pop("state_dict", {}))
    return {
        **({} if hparams is None else {"hparams_name": "hparams", "hyper_parameters": hparams}),
        "callbacks": {},
        **lightning,
        "pytorch-lightning_version": importlib.metadata.version("pytorch-lightning"),
        "epoch": content.trial_state.epochs_trained,
        "global_step": batches if resume is None else resume.optimizer_steps,
        "state_dict": weights,
        "optimizer_states": with_plain_numbers(optimizers),
        # Lightning counts torch's schedulers only. A TrialModule loads all of them, from its own entry.
        "lr_schedulers": with_plain_numbers([copy.deepcopy(one) for one in state[_SCHEDULERS] if "last_epoch" in one]),
        TRIAL_KEY: to_entry(dataclasses.replace(content, state=state, load_data=load_data, resume=resume)),
    }


def to_entry(content: CheckpointContent) -> dict[str, Any]:
    """Return the entry of a ``.ckpt`` file for content without models and optimizers, stored by Lightning itself.

    The entry has plain values only, since ``torch.load`` would refuse numpy's values and others.
    """
    entry: dict[str, Any] = with_plain_values(
        {
            "state": content.state,
            "trial_state": dict(vars(content.trial_state)),
            "resume": None if content.resume is None else dict(vars(content.resume)),
            "load_data": content.load_data,
            "epochs_known": content.epochs_known,
            "name": content.name,
        }
    )
    return entry


def from_entry(entry: Any, source: str = "the Lightning checkpoint") -> CheckpointContent:
    """Return the content of an entry by :func:`to_entry` of this or an earlier release, without weights."""
    what = f"The entry {TRIAL_KEY!r} of {source}"
    if not isinstance(entry, dict) or not isinstance(entry.get("state"), dict):
        raise errors.InvalidCheckpointException(f"{what} must be a dict with a dict 'state'; got {short_text(entry)}.")
    entry = with_own_types(entry)
    load_data = entry.get("load_data")
    trial_state, resume = _split_progress(entry)
    dicts = {"resume": resume, "load_data": load_data}
    wrong = [f"{name!r} is {short_text(one)}" for name, one in dicts.items() if not isinstance(one, dict | None)]
    if wrong:
        raise errors.InvalidCheckpointException(f"Values of {what} must be dicts: {'; '.join(wrong)}.")
    try:
        found = TrialState(**trial_state)
    except TypeError as e:
        raise errors.InvalidCheckpointException(
            f"{what} must hold the progress of the trial; got {short_text(trial_state)}: {e}"
        ) from e
    wrong_counts = find_wrong_counts(vars(found))
    if wrong_counts is not None:
        raise errors.IncompleteCheckpointError(f"{what} is damaged: 'trial_state' {wrong_counts}.")
    name = entry.get("name")
    return CheckpointContent(
        state=entry["state"],
        trial_state=found,
        load_data=load_data,
        resume=None if resume is None else ResumeState.from_dict(resume, what),
        epochs_known=bool(entry.get("epochs_known", True)),
        has_weights=False,
        name=name if isinstance(name, str) else "",
        source=source,
    )


def _split_progress(entry: dict[str, Any]) -> tuple[Any, Any]:
    """Return the trial's state and the resume state, which earlier releases kept in one dict."""
    if "extra" not in entry:
        return entry.get("trial_state"), entry.get("resume")
    extra = entry["extra"]
    if not isinstance(extra, dict):
        return None, extra
    # This is how earlier releases converted a checkpoint that Determined wrote.
    return extra.get("trial_state"), None if extra.keys() == {"trial_state"} else extra


def from_lightning(ckpt: Mapping[str, Any]) -> CheckpointContent:
    """Convert a ``TrialModule``'s ``.ckpt`` file; ``lightning.pth`` gets what Determined's files cannot hold."""
    if not isinstance(ckpt.get("state_dict"), Mapping):
        raise errors.InvalidCheckpointException(
            f"A checkpoint of Lightning must have an entry 'state_dict'; got {sorted(map(str, ckpt))!s:.500}."
        )
    if TRIAL_KEY not in ckpt:
        raise errors.InvalidCheckpointException(
            f"The file has no entry {TRIAL_KEY!r}: it was written by a LightningModule that is not a TrialModule, and "
            "only a TrialModule's checkpoint can become one of Determined."
        )
    content = from_entry(ckpt[TRIAL_KEY], "the file")
    models, unknown = split_models(ckpt["state_dict"])
    optimizers = ckpt.get("optimizer_states")
    if not isinstance(optimizers, list | None):
        raise errors.InvalidCheckpointException(
            f"The file is damaged: 'optimizer_states' must be a list; got {short_text(optimizers)}."
        )
    moved = ("state_dict", "optimizer_states", "lr_schedulers", TRIAL_KEY)
    lightning = {name: value for name, value in ckpt.items() if name not in moved}
    if unknown:
        lightning["state_dict"] = unknown
    return dataclasses.replace(
        content,
        state={_MODELS: models, _OPTIMIZERS: list(optimizers or []), **content.state},
        load_data=mask_settings(content.load_data or make_load_data(**read_settings(content.resume, None))),
        resume=_mask_settings(content.resume),
        lightning=lightning,
        has_weights=True,
    )


def to_weights(content: CheckpointContent) -> dict[str, Any]:
    """Return the weights of all models in a dict, in the order in which the trial wrapped the models.

    A single model's weights keep their names. Several models' weights are named ``models.<index>.<name>``.
    """
    models = _modernize_state(content)[_MODELS]
    return copy.copy(models[0]) if len(models) == 1 else join_models(models)


def _modernize_state(content: CheckpointContent) -> dict[str, Any]:
    state = dict(content.state)
    source = content.source or "The checkpoint"
    modernize(state, source)
    for key in (_MODELS, _OPTIMIZERS, _SCHEDULERS):
        found = state.get(key)
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise errors.InvalidCheckpointException(
                f"{source} must hold a list of dicts {key!r}; got {sorted(map(str, state))!s:.500}."
            )
    return state


def _mask_settings(resume: ResumeState | None) -> ResumeState | None:
    """Return the resume state without secrets, which an older release may have written."""
    if resume is None or resume.settings is None:
        return resume
    return dataclasses.replace(resume, settings=mask_settings(resume.settings))
