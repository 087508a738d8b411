"""The state dicts of a trial's models, and the single one that a TrialModule has for all of them."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from det_lightning import errors

__all__ = ["join_models", "split_models"]

_MODEL_NAME = re.compile(r"models\.(\d{1,6})(?:\.(.*))?", re.DOTALL)


def join_models(models: list[dict[str, Any]]) -> OrderedDict[str, Any]:
    """Return the state dicts of all models as the one that a TrialModule has: ``models.<index>.<name>``."""
    joined: OrderedDict[str, Any] = OrderedDict()
    versions: OrderedDict[str, Any] = OrderedDict({"": {"version": 1}, "models": {"version": 1}})
    for index, weights in enumerate(models):
        prefix = f"models.{index}."
        joined.update({prefix + name: value for name, value in weights.items()})
        own = _versions_of(weights) or {"": {"version": 1}}
        versions.update({(prefix + name).removesuffix("."): version for name, version in own.items()})
    _set_versions(joined, versions)
    return joined


def split_models(joined: Mapping[str, Any]) -> tuple[list[OrderedDict[str, Any]], dict[str, Any]]:
    """Take apart what :func:`join_models` returned.

    Returns:
        The state dict of each model, and what belongs to none.

    Raises:
        InvalidCheckpointException: a model is missing.
    """
    values: dict[int, OrderedDict[str, Any]] = {}
    versions: dict[int, OrderedDict[str, Any]] = {}
    rest = {}
    for name, value in joined.items():
        match = _MODEL_NAME.fullmatch(str(name))
        if match is None or match[2] is None:
            rest[name] = value
        else:
            values.setdefault(int(match[1]), OrderedDict())[match[2]] = value
    for name, version in _versions_of(joined).items():
        if (match := _MODEL_NAME.fullmatch(str(name))) is not None:
            # A model without any tensor is known by its version only.
            values.setdefault(int(match[1]), OrderedDict())
            versions.setdefault(int(match[1]), OrderedDict())[match[2] or ""] = version
    if sorted(values) != list(range(len(values))):
        raise errors.InvalidCheckpointException(
            f"The models of a TrialModule are numbered from 0; the file holds those of the numbers {sorted(values)}."
        )
    for index, weights in values.items():
        _set_versions(weights, versions.get(index, OrderedDict()))
    return [values[index] for index in range(len(values))], rest


def _versions_of(weights: Any) -> Mapping[str, Any]:
    """Return the versions of the modules, which torch attaches to a state dict."""
    versions = getattr(weights, "_metadata", None)
    return versions if isinstance(versions, Mapping) else {}


def _set_versions(weights: OrderedDict[str, Any], versions: OrderedDict[str, Any]) -> None:
    if versions:
        weights._metadata = versions  # type: ignore[attr-defined]  # where torch looks for it
