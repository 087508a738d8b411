"""``load_data.json``, from which a trial is built again: making and encoding the content."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from det_lightning.checkpoint.format.resume_state import LEFT_OUT, SPELLED
from det_lightning.escaping import escape
from det_lightning.files.plain_values import MOST_IN_SETTINGS, Losses, NotPlainError, as_plain
from det_lightning.files.strict_json import spell_numbers, to_json
from det_lightning.masking import mask_text

logger = logging.getLogger(__name__)

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
