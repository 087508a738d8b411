"""The experiment configuration: reading it, its typed model, and which of its fields have an effect here."""

from __future__ import annotations

from det_lightning.config.effects import FieldEffect, field_effects
from det_lightning.config.experiment import ExperimentConfig
from det_lightning.config.length import Length
from det_lightning.config.overrides import with_overrides
from det_lightning.config.reading import read_config

__all__ = ["ExperimentConfig", "FieldEffect", "Length", "field_effects", "read_config", "with_overrides"]
