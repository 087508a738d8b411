"""The settings of a run in a checkpoint, and ``load_data.json``: strict JSON that notes what it cannot hold."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.resume_state import SETTINGS, ResumeState
from det_lightning.escaping import escape
from det_lightning.files.plain_values import MOST_IN_SETTINGS, Losses, NotPlainError, as_plain
from det_lightning.files.strict_json import read_numbers, spell_numbers, to_json
from det_lightning.masking import mark_left_out, mask_text, short_text

logger = logging.getLogger(__name__)

#: The entry with the types of what was left out of settings; see ``mark_left_out``.
LEFT_OUT = "left_out"
# The entry with the places of NaN and infinities, which are text.
_SPELLED = "numbers_as_text"


def encode_load_data(load_data: Mapping[str, Any]) -> str:
    """Return the text of ``load_data.json``; a warning names values that JSON cannot hold, which are left out."""
    losses = Losses(as_plain(load_data.get(LEFT_OUT) or {}))
    places = list(load_data.get(_SPELLED) or [])
    content = {}
    for name, value in load_data.items():
        if name in (LEFT_OUT, _SPELLED):
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
        content[_SPELLED] = places
    return to_json(content)


def read_settings(resume: ResumeState | None, load_data: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return hyperparameters and experiment configuration; None for what the trial did not have.

    Looking up what was left out when they were written is an error. ``load_data.json`` holds neither if one of the two
    was missing; then ``resume`` has the other.
    """
    settings = {} if resume is None else resume.settings or {}
    known = load_data or {}
    found = {name: known.get(name) for name in SETTINGS}
    found = {name: settings.get(name) if value is None else value for name, value in found.items()}
    wrong = [f"{name!r} is {short_text(value)}" for name, value in found.items() if not isinstance(value, dict | None)]
    if wrong:
        raise errors.InvalidCheckpointException(
            f"The settings of a run should be JSON objects; they are {'; '.join(wrong)}."
        )
    gaps = known.get(LEFT_OUT) or settings.get(LEFT_OUT)
    gaps = gaps if isinstance(gaps, dict) else {}
    noted = known.get(_SPELLED)
    places = frozenset(one for one in noted if isinstance(one, str)) if isinstance(noted, list) else frozenset()
    return {name: mark_left_out(read_numbers(value, name, places), name, gaps) for name, value in found.items()}
