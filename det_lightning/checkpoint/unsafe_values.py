"""Names values that a resume cannot read safely, once, when a checkpoint with them is written."""

from __future__ import annotations

import collections
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from det_lightning import errors
from det_lightning.checkpoint import safe_load
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.lightning_file import TRIAL_KEY
from det_lightning.checkpoint.format.standard_values import save_state
from det_lightning.escaping import get_logger, name_type

logger = get_logger(__name__)

# Nearly all values of a checkpoint are of these types, and need no further look.
_PLAIN = frozenset({type(None), bool, float, int, str, torch.Tensor, torch.nn.Parameter})
_CONTAINERS = frozenset(
    {dict, collections.OrderedDict, collections.defaultdict, list, tuple, set, frozenset, collections.deque}
)
# What a defaultdict may call, if it is to be read back.
_FACTORIES = (None, bool, dict, float, int, list, set, str)
# The kinds of numpy's values that refer to no Python objects.
_NUMPY_KINDS = "biufcSU"


class UnsafeValues:
    """Looks for values that only ``trusted=True`` reads, in the checkpoints of a run.

    Attributes:
        are_possible: the latest checkpoint holds values other than numbers, texts, tensors and plain containers.
    """

    def __init__(self) -> None:
        self.are_possible = False
        self._verdicts: dict[tuple[str, type], bool] = {}
        self._named: set[str] = set()

    def warn_of(self, parts: Mapping[str, Any]) -> None:
        """Warn of unsafe values in parts of a checkpoint, by the names of the parts, once each."""
        others = _find_others("", dict(parts))
        self.are_possible = bool(others)
        if not others:
            return
        found = [f"{place} is a {name_type(value)}" for place, value in others if not self._is_readable(place, value)]
        new = [text for text in dict.fromkeys(found) if text not in self._named]
        self._named.update(new)
        if new:
            logger.warning(
                "%s: a resume needs trusted=True, because reading the values could run code. Store numbers, texts, "
                "tensors and plain containers instead.",
                "; ".join(new),
            )

    def _is_readable(self, place: str, value: Any) -> bool:
        key = (place, type(value))
        if key not in self._verdicts:
            self._verdicts[key] = _can_be_read(value)
        return self._verdicts[key]


def list_parts(content: CheckpointContent) -> dict[str, Any]:
    """Return the parts of a checkpoint that a resume reads, by the names in messages."""
    resume = {} if content.resume is None else vars(content.resume)
    lightning = {} if content.lightning is None else list_lightning_parts(content.lightning)
    return {**content.state, **resume, **lightning}


def list_lightning_parts(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a checkpoint by Lightning, by the names in messages."""
    entry = checkpoint.get(TRIAL_KEY) or {}
    own = {**(entry.get("state") or {}), **(entry.get("resume") or {})}
    return {**own, **{f"Lightning's {name}": part for name, part in checkpoint.items() if name != TRIAL_KEY}}


def _find_others(place: str, value: Any) -> list[tuple[str, Any]]:
    """Return the values inside a container that are not plain, with their places."""
    found: list[tuple[str, Any]] = []
    left = collections.deque([(place, value)] if type(value) in _CONTAINERS else [])
    seen: set[int] = set()
    while left:
        place, value = left.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        entries: list[tuple[Any, Any]] = [*(value.items() if isinstance(value, Mapping) else enumerate(value))]
        if isinstance(value, Mapping):
            entries += zip(value, value, strict=True)  # the keys themselves
        for key, one in entries:
            kind = type(one)
            # Nearly all are of these types: a call for each would take longer than the rest of a save.
            if kind in _PLAIN:
                continue
            is_array = kind is np.ndarray or isinstance(one, np.generic)
            if is_array and one.dtype.kind in _NUMPY_KINDS and one.itemsize > 0:
                continue
            inside = f"{place}[{key!r:.100}]" if place else str(key)
            is_read = kind is not collections.defaultdict or one.default_factory in _FACTORIES
            others = left if kind in _CONTAINERS and is_read else found
            others.append((f"the key of {inside}" if one is key else inside, one))
    return found


def _can_be_read(value: Any) -> bool:
    """Return whether a written value can be read without trust; True if it cannot even be written."""
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as folder:
        path = pathlib.Path(folder, "value.pth")
        try:
            save_state({"value": value}, path)
        except Exception:  # whatever a foreign object raises is raised again when the checkpoint is written
            return True
        try:
            safe_load.read_state(path)
        except errors.CheckpointError:
            return False
    return True
