"""From an experiment configuration to one set of hyperparameters and what else a trial reads from it."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_lightning.hyperparameters import chosen_hparams
from det_lightning.masking import cause_without_secrets, mask, mask_text
from det_lightning.testing.outcomes import BadTrial

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
# What YAML 1.1, of which PyYAML is, takes for text.
_EXPONENT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$")


def read_config(path: Path) -> dict[str, Any]:
    """Read an experiment configuration, and fill in the defaults that a trial on a cluster would find in it.

    Raises:
        BadTrial: there is no such file, or it is not a YAML mapping.
    """
    try:
        import yaml
    except ImportError as e:
        raise BadTrial("Reading --trial-config needs PyYAML: pip install 'det-lightning[testing]'.") from e
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader(yaml))
    except OSError as e:
        raise BadTrial(f"--trial-config {path} cannot be read: {e.strerror or e}.") from e
    except yaml.YAMLError as e:
        raise BadTrial(f"--trial-config {path} is not YAML: {mask_text(str(e))}.") from cause_without_secrets(e)
    if not isinstance(content, dict):
        raise BadTrial(
            f"--trial-config {path} should hold an experiment configuration, a mapping with 'hyperparameters' and the "
            f"like; it holds {type(content).__name__} {mask(content)!r:.80}."
        )
    return _with_defaults(content, _DEFAULTS)


def _loader(yaml: Any) -> type:
    """Return PyYAML's safe loader, for which 1e-3 is a number too, as it is for Determined's master."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
    return Loader


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
    """Return one value for each hyperparameter of a configuration; see :func:`chosen_hparams`.

    Raises:
        BadTrial: an entry is of an unknown type, or lacks its values; all such are named.
    """
    try:
        return chosen_hparams(config)
    except ValueError as e:
        raise BadTrial(str(e)) from e
