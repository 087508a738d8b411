"""``load_data.json``, from which a trial is built again: reading every release's form, and writing today's."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import LOAD_DATA_FILE, METADATA_FILE, read_json
from det_lightning.checkpoint.format.resume_state import LEFT_OUT, SPELLED
from det_lightning.escaping import escape
from det_lightning.files.plain_values import MOST_IN_SETTINGS, Losses, NotPlainError, as_plain
from det_lightning.files.strict_json import spell_numbers, to_json
from det_lightning.masking import mask_text

logger = logging.getLogger(__name__)

#: The entries of ``load_data.json``.
LOAD_DATA_ENTRIES = frozenset({"trial_type", "experiment_config", "hparams", "trial_cls_spec", "is_trainer"})
_KINDS: dict[str, tuple[Any, str]] = {
    "hparams": (dict | None, "an object"),
    "experiment_config": (dict | None, "an object"),
    "is_trainer": (bool | None, "true or false"),
    "trial_type": (str | None, "a string"),
}
# The platform's entrypoint can also be a command.
_MAX_SPEC_CHARS = 100_000


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


def encode_load_data(load_data: Mapping[str, Any]) -> str:
    """Return the text of ``load_data.json``; leave out values that JSON cannot hold, and name these in a warning."""
    losses = Losses(as_plain(load_data.get(LEFT_OUT) or {}))
    places = list(load_data.get(SPELLED) or [])
    content = {}
    for name, value in load_data.items():
        if name in (LEFT_OUT, SPELLED):
            continue
        try:
            plain = as_plain(value, name, losses, MOST_IN_SETTINGS)
        except NotPlainError as e:
            losses.notes.append(str(e).removesuffix("."))
        else:
            content[name] = spell_numbers(plain, name, places)
    if losses.notes:
        logger.warning("Not everything can be stored: %s.", mask_text(escape("; ".join(losses.notes))))
    if losses.left_out:
        content[LEFT_OUT] = losses.left_out
    if places:
        content[SPELLED] = places
    return to_json(content)


def read_load_data(directory: pathlib.Path) -> dict[str, Any]:
    """Return how to rebuild the trial of the checkpoint in ``directory``, in the form of ``load_data.json``.

    ``trial_cls_spec`` is the trial's class as ``"module:QualName"``. Releases since 0.17.8 write ``load_data.json``;
    for older ones, the platform's download added the entries to ``metadata.json``.
    """
    path = directory / LOAD_DATA_FILE
    if path.is_file():
        found = content = read_json(path)
        if content.get("trial_type") == "EstimatorTrial":  # Determined writes nothing else about it
            found = content = {**make_load_data(None, None, is_trainer=False), **content}
        missing = [name for name in ("hparams", "experiment_config", "trial_cls_spec") if name not in content]
        if missing:
            raise errors.IncompleteCheckpointError(
                f"{path} lacks {', '.join(missing)}; it has {', '.join(sorted(content)):.300}."
            )
    else:
        path = directory / METADATA_FILE
        found = read_json(path) if path.is_file() else {}
        config = found.get("experiment_config")
        spec = config.get("entrypoint") if isinstance(config, dict) else None
        content = make_load_data(found.get("hparams"), config, spec, is_trainer=False)
    _require_kinds(path, {**found, "trial_cls_spec": content["trial_cls_spec"]})
    return content


def _require_kinds(source: pathlib.Path, content: dict[str, Any]) -> None:
    wrong = [
        f"{name!r} should be {expected}; it is a {type(content[name]).__name__}"
        for name, (kind, expected) in _KINDS.items()
        if not isinstance(content.get(name), kind)
    ]
    spec = content["trial_cls_spec"]
    if not isinstance(spec, str | None):
        wrong.append(f"the trial's class should be a string; got {spec!r:.200}")
    elif spec is not None and len(spec) > _MAX_SPEC_CHARS:
        wrong.append(f"the trial's class should be named by module:Class; got {len(spec):,} characters")
    if wrong:
        raise errors.IncompleteCheckpointError(f"{source}: {'; '.join(wrong)}.")
