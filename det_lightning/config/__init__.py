"""The experiment configuration: reading, the typed model, and the effect of each field."""

from __future__ import annotations

from det_lightning.config.effects import FieldEffect, field_effects, without_effect_in_calls
from det_lightning.config.experiment import ExperimentConfig
from det_lightning.config.length import Length
from det_lightning.config.reading import GivenConfig, read_config, read_given, with_overrides
from det_lightning.config.training import TrainingSettings

__all__ = [
    "ExperimentConfig",
    "FieldEffect",
    "GivenConfig",
    "Length",
    "TrainingSettings",
    "field_effects",
    "read_config",
    "read_given",
    "with_overrides",
    "without_effect_in_calls",
]
