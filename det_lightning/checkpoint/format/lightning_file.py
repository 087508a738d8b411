"""Between Determined's checkpoints, Lightning's ``.ckpt`` files and plain weights. Needs no Lightning.

What :func:`to_lightning` makes of a checkpoint :func:`from_lightning` takes apart again, without a loss. Of a ``.ckpt``
that another ``LightningModule`` wrote only what Determined's format has a place for can be used by a trial.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.joined_models import join_models, split_models
from det_lightning.checkpoint.format.layout import LOAD_DATA_FILE, read_json
from det_lightning.checkpoint.format.resume_values import find_mistakes
from det_lightning.checkpoint.format.trial_state import TrialState
from det_lightning.checkpoint.format.upgrade import modernize, read_load_data
from det_lightning.checkpoint.safe_load.reading import CheckpointContent
from det_lightning.checkpoint.storage.writer import CheckpointFiles
from det_lightning.masking import mask

__all__ = [
    "TRIAL_KEY",
    "collect_load_data",
    "from_lightning",
    "read_settings",
    "to_lightning",
    "to_weights",
]

#: Where a TrialModule keeps its own state in a checkpoint file of Lightning's.
TRIAL_KEY = "det_lightning"

_MODELS, _OPTIMIZERS, _SCHEDULERS = "models_state_dict", "optimizers_state_dict", "lr_schedulers_state_dict"


def to_lightning(content: CheckpointContent, load_data: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of a ``.ckpt`` file from which ``pl.Trainer.fit(TrialModule(...), ckpt_path=...)`` goes on.

    Args:
        content: a checkpoint of any release; stays as it is.
        load_data: content of ``load_data.json``, see :func:`collect_load_data`.

    Raises:
        InvalidCheckpointException: models, optimizers or schedulers are missing.
    """
    state = _modern_state(content)
    models, optimizers = state.pop(_MODELS), state.pop(_OPTIMIZERS)
    resume = _without_secrets(content.resume or {})
    load_data = mask(load_data)
    hparams = mask(read_settings(resume, load_data)["hparams"])
    return {
        **({} if hparams is None else {"hparams_name": "hparams", "hyper_parameters": hparams}),
        "callbacks": {},
        **(content.lightning or {}),
        "pytorch-lightning_version": importlib.metadata.version("pytorch-lightning"),
        "epoch": content.trial_state.epochs_trained,
        "global_step": resume.get("optimizer_steps", content.trial_state.batches_trained),
        "state_dict": join_models(models),
        "optimizer_states": optimizers,
        # Lightning counts the schedulers of torch only. A TrialModule loads all of them, from its own entry.
        "lr_schedulers": [copy.deepcopy(one) for one in state[_SCHEDULERS] if "last_epoch" in one],
        TRIAL_KEY: {
            "state": state,
            "extra": resume or {"trial_state": dict(vars(content.trial_state))},
            "load_data": load_data,
            "epochs_known": content.epochs_known,
            "name": content.name,
        },
    }


def from_lightning(ckpt: Mapping[str, Any], *, any_module: bool = False) -> CheckpointFiles:
    """Return what Determined's files hold of the content of a ``.ckpt`` file; the rest goes to ``lightning.pth``.

    A ``.ckpt`` of a ``TrialModule`` is carried over whole. Of one that another ``LightningModule`` wrote the weights
    become those of a single model, under the names that they have. Optimizers and schedulers are taken over, and how
    far the training had come: batches as counted by Lightning's loop, or else optimizer steps, and epochs. There are
    no states of callbacks or random generators and no position in the data for a trial; Lightning's own entries are
    kept but not used.

    Args:
        ckpt: the content of the file.
        any_module: take a file that was not written by a ``TrialModule``, too.

    Raises:
        InvalidCheckpointException: it is no checkpoint of Lightning's, of another module than asked for, or damaged.
    """
    if not isinstance(ckpt.get("state_dict"), Mapping):
        raise errors.InvalidCheckpointException(
            f"A checkpoint of Lightning's has an entry 'state_dict'; this file has {sorted(map(str, ckpt))}."
        )
    if TRIAL_KEY in ckpt:
        return _from_trial(ckpt)
    if any_module:
        return _from_other_module(ckpt)
    raise errors.InvalidCheckpointException(
        f"The file has no entry {TRIAL_KEY!r}: a LightningModule wrote it that is no TrialModule. any_module=True "
        "takes over its weights, optimizers and schedulers."
    )


def to_weights(content: CheckpointContent) -> dict[str, Any]:
    """Return the weights of all models in one dict.

    Those of a single model have the names that they have in the model; of several models each name begins with
    ``models.<index>.``, in the order in which the trial wrapped them.

    Raises:
        InvalidCheckpointException: models are missing.
    """
    models = _modern_state(content)[_MODELS]
    return copy.copy(models[0]) if len(models) == 1 else join_models(models)


def collect_load_data(directory: pathlib.Path) -> dict[str, Any]:
    """Return how to build the trial of the checkpoint in ``directory``, in the form of ``load_data.json``.

    Raises:
        IncompleteCheckpointError: a file is damaged, or lacks an entry.
    """
    found = read_load_data(directory)
    if (directory / LOAD_DATA_FILE).is_file():
        return read_json(directory / LOAD_DATA_FILE)
    return _load_data(found.hparams, found.experiment_config, found.trial_cls_spec, found.is_trainer)


def read_settings(resume: Mapping[str, Any], load_data: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return hyperparameters and experiment configuration, None for what the trial did not have.

    Args:
        resume: content of ``resume.pth``.
        load_data: content of ``load_data.json``, which holds neither where one of the two was missing.

    Raises:
        InvalidCheckpointException: what ``resume`` tells is damaged.
    """
    names = ("hparams", "experiment_config")
    try:
        settings = json.loads(resume.get("settings") or "{}")
    except (ValueError, TypeError, RecursionError) as e:
        raise errors.InvalidCheckpointException(f"The settings of a run should be JSON: {e}") from e
    known = {name: value for name, value in (load_data or {}).items() if value is not None}
    found = known if not isinstance(settings, dict) else {**settings, **known}
    wrong = [f"{name!r} is {found[name]!r:.200}" for name in names if not isinstance(found.get(name), dict | None)]
    if wrong or not isinstance(settings, dict):
        what = "; ".join(wrong) or f"a {type(settings).__name__}"
        raise errors.InvalidCheckpointException(f"The settings of a run should be JSON objects; they are {what}.")
    return {name: found.get(name) for name in names}


def _modern_state(content: CheckpointContent) -> dict[str, Any]:
    state = dict(content.state)
    source = content.source or str(content.directory)
    modernize(state, source)
    for key in (_MODELS, _OPTIMIZERS, _SCHEDULERS):
        found = state.get(key)
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise errors.InvalidCheckpointException(
                f"{source} should hold a list of dicts {key!r}; it has {sorted(map(str, state))}."
            )
    return state


# Files of Lightning's


def _from_trial(ckpt: Mapping[str, Any]) -> CheckpointFiles:
    entry = ckpt[TRIAL_KEY]
    if not isinstance(entry, dict) or not isinstance(entry.get("state"), dict):
        raise errors.InvalidCheckpointException(f"The entry {TRIAL_KEY!r} has no state; it is {mask(entry)!r:.200}.")
    extra, load_data = entry.get("extra"), entry.get("load_data")
    if not isinstance(extra, dict) or not isinstance(load_data, dict | None):
        raise errors.InvalidCheckpointException(
            f"'extra' and 'load_data' of the entry {TRIAL_KEY!r} should be dicts; got {mask(extra)!r:.99}, "
            f"{mask(load_data)!r:.99}."
        )
    models, unknown = split_models(ckpt["state_dict"])
    lightning = _rest_of(ckpt)
    if unknown:
        lightning["state_dict"] = unknown
    load_data = load_data or _load_data(**read_settings(extra, None))
    trial_state = _trial_state_of(extra)
    if mistakes := find_mistakes(extra):
        raise errors.InvalidCheckpointException(f"The entry {TRIAL_KEY!r} is damaged: {'; '.join(mistakes)}.")
    return CheckpointFiles(
        state={_MODELS: models, _OPTIMIZERS: list(ckpt.get("optimizer_states") or []), **entry["state"]},
        trial_state=trial_state,
        load_data=mask(load_data),
        # Where Determined wrote the checkpoint, nothing else is known.
        resume=None if extra.keys() == {"trial_state"} else _without_secrets(extra),
        lightning=lightning,
        epochs_known=bool(entry.get("epochs_known", True)),
    )


def _from_other_module(ckpt: Mapping[str, Any]) -> CheckpointFiles:
    batches, epochs = _progress_of(ckpt)
    hparams = ckpt.get("hyper_parameters")
    return CheckpointFiles(
        state={
            _MODELS: [ckpt["state_dict"]],
            _OPTIMIZERS: list(ckpt.get("optimizer_states") or []),
            _SCHEDULERS: list(ckpt.get("lr_schedulers") or []),
            "callbacks": {},
        },
        trial_state=TrialState(batches_trained=batches, last_ckpt=batches, epochs_trained=epochs),
        load_data=mask(_load_data(dict(hparams) if isinstance(hparams, Mapping) else None, None)),
        resume=None,
        lightning=_rest_of(ckpt),
    )


def _rest_of(ckpt: Mapping[str, Any]) -> dict[str, Any]:
    moved = ("state_dict", "optimizer_states", "lr_schedulers", TRIAL_KEY)
    rest = {name: value for name, value in ckpt.items() if name not in moved}
    if isinstance(rest.get("hyper_parameters"), dict):
        rest["hyper_parameters"] = mask(rest["hyper_parameters"])
    return rest


def _without_secrets(resume: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``resume.pth`` to be written again; an older release may have written it."""
    settings = mask(read_settings(resume, None))
    return {**resume, "settings": json.dumps(settings)} if "settings" in resume else resume


def _trial_state_of(extra: dict[str, Any]) -> TrialState:
    found: Any = extra.get("trial_state")
    try:
        return TrialState(**found)
    except TypeError as e:
        raise errors.InvalidCheckpointException(
            f"The entry {TRIAL_KEY!r} should tell how far the trial had come; it has {found!r:.200}: {e}"
        ) from e


def _progress_of(ckpt: Mapping[str, Any]) -> tuple[int, int]:
    """Return batches and epochs trained; older releases of Lightning count less."""

    def count(default: Any, *path: str) -> int:
        found: Any = ckpt.get("loops")
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        value = default if found is None else found
        return value if isinstance(value, int) and value >= 0 else 0

    return (
        count(ckpt.get("global_step"), "fit_loop", "epoch_loop.batch_progress", "total", "completed"),
        count(ckpt.get("epoch"), "fit_loop", "epoch_progress", "current", "processed"),
    )


def _load_data(
    hparams: Any, experiment_config: Any, spec: str | None = None, is_trainer: bool = True
) -> dict[str, Any]:
    return {
        "trial_type": "PyTorchTrial",
        "experiment_config": experiment_config,
        "hparams": hparams,
        "trial_cls_spec": spec,
        "is_trainer": is_trainer,
    }
