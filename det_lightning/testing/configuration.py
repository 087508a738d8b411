"""From an experiment configuration to one set of hyperparameters and what else a trial reads from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_lightning.testing.outcomes import BadTrial

__all__ = ["hparams_of", "read_config"]

# What Determined's master fills in before a trial sees its configuration.
_DEFAULTS: dict[str, Any] = {
    "data": {},
    "labels": [],
    "max_restarts": 5,
    "scheduling_unit": 100,
    "records_per_epoch": 0,
    "min_validation_period": {"batches": 0},
    "min_checkpoint_period": {"batches": 0},
    "checkpoint_policy": "best",
    "perform_initial_validation": False,
    "searcher": {"name": "single", "smaller_is_better": True},
    "resources": {"slots_per_trial": 1},
    "optimizations": {
        "aggregation_frequency": 1,
        "average_aggregated_gradients": True,
        "average_training_metrics": True,
        "gradient_compression": False,
        "mixed_precision": "O0",
    },
    "reproducibility": {"experiment_seed": 0},
}


def read_config(path: Path) -> dict[str, Any]:
    """Read an experiment configuration, and fill in the defaults that a trial on a cluster would find in it.

    Raises:
        BadTrial: there is no such file, or it is no YAML mapping.
    """
    try:
        import yaml
    except ImportError as e:
        raise BadTrial("Reading --trial-config needs PyYAML: pip install 'det-lightning[testing]'.") from e
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise BadTrial(f"--trial-config {path} can not be read: {e.strerror or e}.") from e
    except yaml.YAMLError as e:
        raise BadTrial(f"--trial-config {path} is no YAML: {e}.") from e
    if not isinstance(content, dict):
        raise BadTrial(
            f"--trial-config {path} should hold an experiment configuration, a mapping with 'hyperparameters' and the "
            f"like; it holds {type(content).__name__} {content!r:.80}."
        )
    return _with_defaults(content, _DEFAULTS)


def _with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(defaults))
    for name, value in given.items():
        default = merged.get(name)
        if isinstance(value, Mapping) and isinstance(default, dict):
            value = _with_defaults(value, default)
        if value is not None or default is None:
            merged[name] = value
    return merged


def hparams_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return one value for each hyperparameter of a configuration.

    A constant has its own value, ``categorical`` its first one, and a range its middle: for ``log`` that of the
    exponents.

    Raises:
        BadTrial: an entry is of an unknown type, or lacks its values; all such are named.
    """
    entries = config.get("hyperparameters") or {}
    mistakes: list[str] = []
    hparams: dict[str, Any] = _values(entries, "", mistakes)
    if mistakes:
        raise BadTrial("hyperparameters of the configuration: " + "; ".join(mistakes) + ".")
    return hparams


def _values(entries: Mapping[str, Any], prefix: str, mistakes: list[str]) -> dict[str, Any]:
    return {name: _value(entry, f"{prefix}{name}", mistakes) for name, entry in entries.items()}


def _value(entry: Any, name: str, mistakes: list[str]) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    kind = entry.get("type")
    if not isinstance(kind, str) or isinstance(entry.get("type"), Mapping):
        return _values(entry, f"{name}.", mistakes)
    try:
        return _VALUE_OF[kind](entry)
    except KeyError as e:
        known = ", ".join(_VALUE_OF)
        lacks = f"has the unknown type {kind!r} (known are {known})" if kind not in _VALUE_OF else f"lacks {e}"
        mistakes.append(f"{name} {lacks}")
    except (TypeError, IndexError, ValueError, OverflowError) as e:
        mistakes.append(f"{name} can not be read: {e}")
    return None


_VALUE_OF: dict[str, Any] = {
    "const": lambda entry: entry["val"],
    "int": lambda entry: (int(entry["minval"]) + int(entry["maxval"])) // 2,
    "double": lambda entry: (float(entry["minval"]) + float(entry["maxval"])) / 2,
    "log": lambda entry: float(entry.get("base", 10.0)) ** ((float(entry["minval"]) + float(entry["maxval"])) / 2),
    "categorical": lambda entry: entry["vals"][0],
}
