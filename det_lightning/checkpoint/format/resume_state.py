"""The resume state: the content of ``resume.pth``, also part of Lightning's ``.ckpt`` files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from types import NoneType
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.layout import MAX_COUNT, find_wrong_counts
from det_lightning.files.strict_json import is_shallow, read_numbers
from det_lightning.masking import mask_settings, short_text

#: Version of the file format. The first had no number, and held the settings as JSON text.
RESUME_VERSION = 2

_MAX_WORLD_SIZE = 1_000_000

_NEEDED = ("trial_state", "rng_states", "journals", "optimizer_steps", "gradients")
_SETTINGS = ("hparams", "experiment_config")
#: The entry of ``load_data.json`` with the places of NaN and infinities in settings, which are text there.
SPELLED = "numbers_as_text"


@dataclasses.dataclass
class ResumeState:
    """The state for an exact resume beyond Determined's files; its attributes are the content of ``resume.pth``.

    Attributes:
        version: of the file format.
        trial_state: the fields of the ``TrialState`` of the same checkpoint.
        rng_states: the random state of each rank.
        journals: the starts of each rank's passes over the training data; see ``PassJournal``.
        optimizer_steps: number of steps that all optimizers took together.
        gradients: of an unfinished aggregation: for each model, a dict by parameter name. With several ranks, a list
            with such a list for each rank, or with only the average of all ranks where models are sharded.
        precision: state of the precision in an unfinished aggregation.
        world_size: number of ranks that wrote the state.
        settings: ``hparams`` and ``experiment_config``, as JSON and without secrets; None if unknown.
        has_validated: a validation has begun, whose workers may still be alive.
        positions: how far each rank's loaders have come, beyond the journal: the number of training batches ``drawn``
            from the samplers, where workers may be ahead of training, and the states of the samplers. Training data
            that know their position have ``data``: the ``states`` of their parts, how many batches these are
            ``behind`` the training (0 but in early checkpoints), and whether the next batch is an ``epoch_start``.
        best_value: the best value so far of the metric that chooses checkpoints.
        trial: name of the trial in its storage.
        requires_grad: of parameters frozen or unfrozen since training began, by their positions in all models.
        global_batch: among how many ``ranks`` a batch was divided when training began, the ``batch_size`` of each, the
            ``samples_per_epoch`` and the hyperparameter ``global_batch_size``; empty if the trial divides its own data.

    Example:
        >>> from det_lightning.checkpoint import ResumeState
        >>> state = ResumeState({"batches_trained": 2}, rng_states=[{}], journals=[[]], optimizer_steps=2, gradients=[])
        >>> ResumeState.from_dict(vars(state), source="resume.pth") == state
        True
    """

    version: int = dataclasses.field(default=RESUME_VERSION, kw_only=True)
    trial_state: dict[str, int]
    rng_states: list[dict[str, Any]]
    journals: list[list[dict[str, Any]]]
    optimizer_steps: int
    gradients: list[Any]
    precision: dict[str, Any] = dataclasses.field(default_factory=dict)
    world_size: int = 1
    settings: dict[str, Any] | None = None
    has_validated: bool = False
    positions: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best_value: float | None = None
    trial: str | None = None
    requires_grad: dict[int, bool] = dataclasses.field(default_factory=dict)
    global_batch: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> ResumeState:
        """Read the content of ``resume.pth``, of any version; ignore unknown entries.

        Raise an ``InvalidCheckpointException`` if a newer release wrote the content, and an
        ``IncompleteCheckpointError`` that names every missing or wrong value.
        """
        version = values.get("version", 1)
        if type(version) is int and version > RESUME_VERSION:
            raise errors.InvalidCheckpointException(
                f"{source} has version {short_text(version)} of the state for an exact resume; this release of "
                f"det_lightning reads versions up to {RESUME_VERSION}. Update det_lightning."
            )
        names = [field.name for field in dataclasses.fields(cls) if field.name != "version"]
        found = {name: values[name] for name in names if name in values}
        mistakes = []
        if type(version) is not int or version < 1:
            mistakes.append(f"'version' must be a positive integer; got {_show(version)}")
        if version == 1 and found.get("settings") is not None:
            found["settings"] = _parse_settings(found["settings"])
        mistakes += _find_mistakes(found)
        if mistakes:
            raise errors.IncompleteCheckpointError(
                f"{source} is damaged, or another kind of file: {'; '.join(mistakes):.2000}. Use another checkpoint; "
                "without this file a run resumes as in Determined, without its position in the data."
            )
        return cls(**found)

    def require_journals(self, source: str) -> None:
        """Raise an ``IncompleteCheckpointError`` unless the journals have all entries for an exact resume."""
        for start in (start for journal in self.journals for start in journal):
            if not _fits(start, {"first_batch": _is_count, "rng": dict, "samplers": [dict]}):
                raise errors.IncompleteCheckpointError(
                    f"{source} is damaged: 'journals' must have only 'first_batch', an integer, 'rng', a dict, and "
                    f"'samplers', a list of dicts, of each pass over the data; got {short_text(start)}."
                )


def read_settings(resume: ResumeState | None, load_data: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return hyperparameters and experiment configuration; None for settings that the trial did not have.

    If the trial had only one of the two settings, ``load_data.json`` holds neither, and ``resume`` has that one.
    """
    settings = {} if resume is None else resume.settings or {}
    known = load_data or {}
    found = {name: known.get(name) for name in _SETTINGS}
    found = {name: settings.get(name) if value is None else value for name, value in found.items()}
    wrong = [f"{name!r} is {short_text(value)}" for name, value in found.items() if not isinstance(value, dict | None)]
    if wrong:
        raise errors.InvalidCheckpointException(f"The settings of a run must be JSON objects: {'; '.join(wrong)}.")
    if isinstance(noted := known.get(SPELLED), list):
        places = frozenset(one for one in noted if isinstance(one, str))
        found = {name: read_numbers(value, name, places) for name, value in found.items()}
    return found


def _parse_settings(text: Any) -> Any:
    """Parse the settings, which the first version kept as text; text that cannot be parsed is returned as it is."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return text


def _find_mistakes(values: dict[str, Any]) -> list[str]:
    mistakes = [f"{name!r} is missing" for name in _NEEDED if name not in values]
    mistakes += [
        f"{name!r} must be {expected}; got {_show(values[name], name)}"
        for name, (expected, form) in _EXPECTED.items()
        if name in values and not _fits(values[name], form)
    ]
    if mistakes:
        return mistakes
    wrong_counts = find_wrong_counts(values["trial_state"])
    if wrong_counts is not None:
        mistakes.append(f"'trial_state' {wrong_counts}")
    world_size = values.get("world_size")
    # The first releases wrote no positions.
    for name in ("rng_states", "journals", *(["positions"] if values.get("positions") else [])):
        if world_size is not None and len(values[name]) != world_size:
            mistakes.append(f"{name!r} must have an entry for each of {world_size} ranks; got {len(values[name]):,}")
    return mistakes


def _show(value: Any, name: str = "") -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    return short_text(mask_settings(value) if name == "settings" and isinstance(value, dict) else value)


def _fits(value: Any, form: Any) -> bool:
    """Return whether a value has a form, a class, a function, a list of one form, or a dict of forms by key."""
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(item, form[0]) for item in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and value.keys() == form.keys() and all(_fits(value[k], form[k]) for k in form)
    return isinstance(value, form) if isinstance(form, type | tuple) else bool(form(value))


def _is_count(value: Any, least: int = 0, most: int = MAX_COUNT) -> bool:
    return type(value) is int and least <= value <= most


def _is_settings(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(isinstance(value.get(name), dict | None) for name in _SETTINGS)
        and is_shallow(value)
        and _is_json(value)
    )


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(item) for name, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or type(value) in (bool, int, float, str)


def _is_start(value: Any) -> bool:
    return isinstance(value, dict) and _is_count(value.get("first_batch", 0))


def _is_flags(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_count(place) and type(flag) is bool for place, flag in value.items())


def _is_global_batch(value: Any) -> bool:
    sizes = ("batch_size", "samples_per_epoch", "global_batch_size")
    return value == {} or (
        isinstance(value, dict)
        and value.keys() == {"ranks", *sizes}
        and _is_count(value["ranks"], 1, _MAX_WORLD_SIZE)
        and all(value[name] is None or _is_count(value[name], 1) for name in sizes)
    )


def _is_of_model(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(gradient, torch.Tensor) for name, gradient in value.items()
    )


def _is_position(value: Any) -> bool:
    rest = dict(value) if isinstance(value, dict) else {}
    return ("data" not in rest or _fits(rest.pop("data"), _DATA)) and _fits(rest, _POSITION)


_DATA = {"states": list, "behind": _is_count, "epoch_start": bool}
_POSITION = {"training": {"drawn": _is_count, "samplers": [dict]}, "validation": [dict]}

# What each value should be, in words, and the form.
_EXPECTED: dict[str, tuple[str, Any]] = {
    "trial_state": ("a dict of counts", dict),
    "rng_states": (
        "a list with a dict of random states for each rank",
        lambda value: _fits(value, [dict]) and len(value) > 0,
    ),
    "journals": (
        "a list of the starts of passes over the data for each rank",
        lambda value: _fits(value, [[_is_start]]) and len(value) > 0,
    ),
    "optimizer_steps": (f"an integer from 0 to {MAX_COUNT}", _is_count),
    "gradients": (
        "a list of dicts of tensors",
        lambda value: _fits(value, [_is_of_model]) or _fits(value, [[_is_of_model]]),
    ),
    "precision": ("a dict", dict),
    "world_size": (f"an integer from 1 to {_MAX_WORLD_SIZE}", lambda value: _is_count(value, 1, _MAX_WORLD_SIZE)),
    "settings": ("JSON objects named hparams and experiment_config", _is_settings),
    "has_validated": ("true or false", bool),
    "positions": ("a list of the positions of the loaders of each rank", [_is_position]),
    "best_value": ("a number", (int, float, NoneType)),
    "trial": ("a name", (str, NoneType)),
    "requires_grad": ("a dict of true or false, by position", _is_flags),
    "global_batch": ("the sizes of a batch on all ranks", _is_global_batch),
}
