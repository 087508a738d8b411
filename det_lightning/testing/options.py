"""The options of the command line."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_lightning.extras import how_to_install
from det_lightning.hyperparameters import chosen_hparams
from det_lightning.masking import cause_without_secrets, mask, mask_text
from det_lightning.testing.outcomes import BadTrial
from det_lightning.testing.records.record import RecordError, read_record

#: Fewer leave no room for an end of an epoch, a validation and a batch between them.
MIN_BATCHES = 6
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_NEED_A_TRIAL = ("config", "hparams", "kwargs", "reference", "record", "checkpoint", "metrics", "report")
# Determined's master fills these in before a trial sees its configuration.
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
# PyYAML follows YAML 1.1, in which these are strings.
_EXPONENT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$")


@dataclasses.dataclass(frozen=True)
class TrialOptions:
    """A trial, and how it is trained."""

    spec: str  # "module:Class" or "path/to/file.py:Class"
    directory: Path  # of the module; paths are relative to it
    hparams: dict[str, Any] | None = None
    config: dict[str, Any] | None = None  # the experiment configuration
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the constructor, beyond the context
    batches: int = 12  # number of batches of each run
    seed: int = 0
    tolerance: float | None = None  # relative, for numbers of the reference; None for one that fits both environments
    reference: Path | None = None  # a record of the real determined
    record: Path | None = None  # the file to write such a record to
    checkpoint: str | None = None  # an old checkpoint
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # validation metrics of that checkpoint
    report: Path | None = None  # the file to write the HTML report to

    @property
    def aggregation_frequency(self) -> int:
        optimizations = (self.config or {}).get("optimizations") or {}
        return int(optimizations.get("aggregation_frequency") or 1)


def trial_options(values: Any, directory: Path) -> TrialOptions | None:
    """Return the options among ``pytest.Config.option``; None if there is no trial. BadTrial names all mistakes."""
    mistakes: list[str] = []

    def tried(read: Any, *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except (BadTrial, ValueError) as e:
            mistakes.append(str(e))
        return None

    def path(value: str | None) -> Path | None:
        return directory / value if value else None

    config = tried(read_config, directory / values.trial_config) if values.trial_config else None
    spec = values.trial or _entrypoint(config)
    if spec is None:
        given = ", ".join(f"--trial-{name}" for name in _NEED_A_TRIAL if getattr(values, f"trial_{name}"))
        if given:
            raise BadTrial("\n".join(mistakes or [f"{given} needs a trial; add --trial module:Class."]))
        return None
    if not all(spec.rpartition(":")[::2]):
        mistakes.append(f"--trial must be module:Class, such as model_def:MyTrial; got {spec!r}.")
    hparams = tried(_json_object, "--trial-hparams", values.trial_hparams, '{"lr": 0.1}')
    if config is not None:
        hparams = {**(tried(chosen_hparams, config) or {}), **(hparams or {})}
    arguments = tried(_json_object, "--trial-kwargs", values.trial_kwargs, '{"depth": 18}')
    metrics = tried(_json_object, "--trial-metrics", values.trial_metrics, '{"validation_loss": 0.25}') or {}
    if wrong := {name: value for name, value in metrics.items() if not isinstance(value, int | float)}:
        mistakes.append(f"--trial-metrics must be numbers; got {wrong}.")
    if values.trial_batches < MIN_BATCHES:
        mistakes.append(f"--trial-batches must be at least {MIN_BATCHES}; got {values.trial_batches}.")
    if mistakes:
        raise BadTrial("\n".join(mistakes))
    reference = path(values.trial_reference)
    if reference is not None and config is None and hparams is None:
        hparams, config = _settings_of(reference)
    return TrialOptions(
        spec=spec,
        directory=directory,
        hparams=hparams,
        config=config,
        arguments=arguments or {},
        batches=values.trial_batches,
        seed=int(((config or {}).get("reproducibility") or {}).get("experiment_seed") or 0),
        tolerance=values.trial_tolerance,
        reference=reference,
        record=path(values.trial_record),
        checkpoint=values.trial_checkpoint,
        metrics=metrics,
        report=path(values.trial_report),
    )


def _settings_of(reference: Path) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return hyperparameters and configuration of a record; None if it cannot be read, which a check reports."""
    try:
        settings = read_record(reference).settings
    except RecordError:
        return None, None
    return dict(settings.hparams), settings.config


def _entrypoint(config: dict[str, Any] | None) -> str | None:
    """Return the class that the entrypoint names, alone or as an argument of a command."""
    entrypoint = (config or {}).get("entrypoint")
    words = entrypoint.split() if isinstance(entrypoint, str) else entrypoint
    if not isinstance(words, list):
        return None
    alone = len(words) == 1
    classes = [word for word in words if isinstance(word, str) and (_CLASS.fullmatch(word) or (alone and ":" in word))]
    return classes[0] if len(classes) == 1 else None


def _json_object(option: str, text: str | None, example: str) -> dict[str, Any] | None:
    if text is None:
        return None
    message = f"{option} must be a JSON object, such as '{example}'; got {mask_text(text)!r}"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as e:
        raise BadTrial(f"{message}: {e}.") from e
    if not isinstance(value, dict):
        raise BadTrial(f"{message}.")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """Read an experiment configuration with the defaults of Determined's master; raises BadTrial if it is not one."""
    try:
        import yaml
    except ImportError as e:
        raise BadTrial(f"Reading --trial-config needs PyYAML: {how_to_install('testing')}.") from e
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader(yaml))
    except OSError as e:
        raise BadTrial(f"--trial-config {path} cannot be read: {e.strerror or e}.") from e
    except yaml.YAMLError as e:
        raise BadTrial(f"--trial-config {path} is not YAML: {mask_text(str(e))}.") from cause_without_secrets(e)
    if not isinstance(content, dict):
        raise BadTrial(
            f"--trial-config {path} must be an experiment configuration, a mapping with keys such as "
            f"'hyperparameters'; it is a {type(content).__name__}: {mask(content)!r:.80}."
        )
    return _with_defaults(content, _DEFAULTS)


def _loader(yaml: Any) -> type:
    """Return PyYAML's safe loader, made to read 1e-3 as a number, as Determined's master does."""

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
