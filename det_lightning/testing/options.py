"""What the user asked for on the command line."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from det_lightning.masking import mask_text
from det_lightning.testing.configuration import hparams_of, read_config
from det_lightning.testing.outcomes import BadTrial
from det_lightning.testing.records.record import RecordError, read_record

#: Fewer have no room for an epoch's end, a validation and something between them.
MIN_BATCHES = 6
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_NEED_A_TRIAL = ("config", "hparams", "kwargs", "reference", "record", "checkpoint", "metrics", "report")


@dataclasses.dataclass(frozen=True)
class TrialOptions:
    """Which trial, and how it is trained.

    Attributes:
        tolerance: how far a number may be from the reference's, relative; None for what fits both environments.
    """

    spec: str  # the trial's class, as "module:Class" or "path/to/file.py:Class"
    directory: Path  # where the module is looked for, and what paths are relative to
    hparams: dict[str, Any] | None = None  # its hyperparameters; None if none were given
    config: dict[str, Any] | None = None  # its experiment configuration; None if none was given
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # of its constructor, beyond the context
    batches: int = 12  # how many to train on in each run
    seed: int = 0  # of each run
    tolerance: float | None = None
    reference: Path | None = None  # a record of the real determined
    record: Path | None = None  # where to write one
    checkpoint: str | None = None  # an old checkpoint to load
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # its validation metrics, if they are known
    report: Path | None = None  # where to write the HTML report

    @property
    def aggregation_frequency(self) -> int:
        """Number of batches of an update, as the configuration says."""
        optimizations = (self.config or {}).get("optimizations") or {}
        return int(optimizations.get("aggregation_frequency") or 1)


def trial_options(values: Any, directory: Path) -> TrialOptions | None:
    """Return what the options of the command line ask for; None if no trial is named.

    Args:
        values: an object with the options as attributes, such as ``pytest.Config.option``.
        directory: what paths are relative to.

    Raises:
        BadTrial: options are missing or cannot be read; all that is wrong is named.
    """
    mistakes: list[str] = []

    def tried(read: Any, *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except BadTrial as e:
            mistakes.append(str(e))
        return None

    def path(value: str | None) -> Path | None:
        return directory / value if value else None

    config = tried(read_config, directory / values.trial_config) if values.trial_config else None
    spec = values.trial or _entrypoint(config)
    if spec is None:
        given = ", ".join(f"--trial-{name}" for name in _NEED_A_TRIAL if getattr(values, f"trial_{name}"))
        if given:
            raise BadTrial("\n".join(mistakes or [f"{given} name(s) no trial; add --trial module:Class."]))
        return None
    if not all(spec.rpartition(":")[::2]):
        mistakes.append(f"--trial must be module:Class, such as model_def:MyTrial; got {spec!r}.")
    hparams = tried(_json_object, "--trial-hparams", values.trial_hparams, '{"lr": 0.1}')
    if config is not None:
        hparams = {**(tried(hparams_of, config) or {}), **(hparams or {})}
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
    """Return hyperparameters and configuration of a record; nothing if it cannot be read, which its check reports."""
    try:
        settings = read_record(reference).settings
    except RecordError:
        return None, None
    return dict(settings.hparams), settings.config


def _entrypoint(config: dict[str, Any] | None) -> str | None:
    """Return the class that the entrypoint names, alone or for Determined to run."""
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
    try:
        value = json.loads(text)
    except json.JSONDecodeError as e:
        raise BadTrial(f"{option} must be a JSON object, such as '{example}'; got {mask_text(text)!r}: {e}.") from e
    if not isinstance(value, dict):
        raise BadTrial(f"{option} must be a JSON object, such as '{example}'; got {mask_text(text)!r}.")
    return value
