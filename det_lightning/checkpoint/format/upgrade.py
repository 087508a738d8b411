"""The layouts of older releases, converted to that of the newest."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import LOAD_DATA_FILE, METADATA_FILE, read_json

# Up to 0.12.12 a trial had one model, one optimizer and one scheduler, and no lists of them.
_SINGLE_KEYS = {
    "model_state_dict": "models_state_dict",
    "optimizer_state_dict": "optimizers_state_dict",
    "lr_scheduler": "lr_schedulers_state_dict",
}

# The platform's entrypoint can be a command, too.
_MAX_SPEC_CHARS = 100_000


def modernize(state: dict[str, Any], source: str) -> None:
    """Convert the keys of a state to today's, in place."""
    both = [f"{old!r} and {new!r}" for old, new in _SINGLE_KEYS.items() if old in state and new in state]
    if both:
        raise errors.InvalidCheckpointException(
            f"{source} holds both {' and both '.join(both)}; no release of Determined wrote such a file."
        )
    _require_kinds(state, source)
    is_old = any(old in state for old in _SINGLE_KEYS)
    for old, new in _SINGLE_KEYS.items():
        if old in state:
            single = state.pop(old)
            state[new] = [] if single is None else [single]
        elif is_old:
            state.setdefault(new, [])


def _require_kinds(state: dict[str, Any], source: str) -> None:
    kinds = {**dict.fromkeys(_SINGLE_KEYS.values(), list), "callbacks": dict, "rng_state": dict}
    wrong = [f"{key!r} should be a {kind.__name__}" for key, kind in kinds.items() if not _is(state.get(key), kind)]
    for key, inner in (("optimizers_state_dict", "param_groups"), ("lr_schedulers_state_dict", "_last_lr")):
        for one in state.get(key) or [] if not wrong else []:
            if isinstance(one, dict) and not _is(one.get(inner), list):
                wrong.append(f"{inner!r} in {key!r} should be a list")
    if wrong:
        raise errors.InvalidCheckpointException(
            f"{source} is damaged, or is not a checkpoint of a trial: {'; '.join(wrong)}."
        )


def _is(value: Any, kind: type) -> bool:
    return value is None or isinstance(value, kind)


@dataclasses.dataclass(frozen=True)
class LoadData:
    """How to build the trial of a checkpoint again, as the file ``source`` holds it.

    ``trial_cls_spec`` is the trial's class, as ``"module:QualName"``. If not ``is_trainer``, the platform built the
    trial, by the configuration. ``may_be_functional``: it may have the interface before 0.12.13, with ``build_model``.
    ``content`` is all that in the form of ``load_data.json``.
    """

    source: pathlib.Path
    trial_cls_spec: str | None
    hparams: dict[str, Any] | None
    experiment_config: dict[str, Any] | None
    is_trainer: bool
    may_be_functional: bool
    content: dict[str, Any]


def read_load_data(directory: pathlib.Path) -> LoadData:
    """Read how to build the trial of the checkpoint in ``directory``.

    Since 0.17.8 ``load_data.json`` holds that; before, ``metadata.json`` did, which the platform's download added.
    """
    path = directory / LOAD_DATA_FILE
    if path.is_file():
        content = read_json(path)
        if content.get("trial_type") == "EstimatorTrial":  # of which Determined writes nothing else
            content = {**make_load_data(None, None, is_trainer=False), **content}
        missing = [name for name in ("hparams", "experiment_config", "trial_cls_spec") if name not in content]
        if missing:
            raise errors.IncompleteCheckpointError(
                f"{path} lacks {', '.join(missing)}; it has {', '.join(sorted(content)):.300}."
            )
        spec = content["trial_cls_spec"]
        _require_load_data(path, content, spec)
        is_trainer = bool(content.get("is_trainer", False))
        return LoadData(path, spec, content["hparams"], content["experiment_config"], is_trainer, False, content)
    path = directory / METADATA_FILE
    content = read_json(path) if path.is_file() else {}
    config = content.get("experiment_config")
    spec = config.get("entrypoint") if isinstance(config, dict) else None
    hparams = content.get("hparams")
    _require_load_data(path, content, spec)
    return LoadData(path, spec, hparams, config, False, True, make_load_data(hparams, config, spec, is_trainer=False))


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


def _require_load_data(source: pathlib.Path, content: dict[str, Any], spec: Any) -> None:
    kinds: dict[str, tuple[Any, str]] = dict.fromkeys(("hparams", "experiment_config"), (dict | None, "an object"))
    kinds["is_trainer"] = bool | None, "true or false"
    kinds["trial_type"] = str | None, "a string"
    wrong = [
        f"{name!r} should be {expected}; it is a {type(content[name]).__name__}"
        for name, (kind, expected) in kinds.items()
        if not isinstance(content.get(name), kind)
    ]
    if not isinstance(spec, str | None):
        wrong.append(f"the trial's class should be a string; got {spec!r:.200}")
    if isinstance(spec, str) and len(spec) > _MAX_SPEC_CHARS:
        wrong.append(f"the trial's class should be named by module:Class; got {len(spec):,} characters")
    if wrong:
        raise errors.IncompleteCheckpointError(f"{source}: {'; '.join(wrong)}.")
