"""Configurations to test with."""

from __future__ import annotations

import textwrap

import pytest

from det_lightning.config import ExperimentConfig, read_config
from det_lightning.errors import ConfigError, ConfigMistake

COMPLETE = """
name: const
entrypoint: model_def:MyTrial
hyperparameters:
  global_batch_size: 32
searcher:
  name: single
  metric: loss
  max_length: {epochs: 2}
"""


def read(text: str, *overrides: str) -> ExperimentConfig:
    """Read what lacks nothing but ``text``, whose lines count from 1."""
    return read_config(textwrap.dedent(text).strip("\n") + COMPLETE, overrides)


def read_alone(text: str) -> ExperimentConfig:
    """Read ``text`` as it is."""
    return read_config(textwrap.dedent(text).lstrip("\n") + "\n")


def read_part(text: str, *overrides: str) -> ExperimentConfig:
    """Read ``text``, which may lack what an experiment needs."""
    return read_config(textwrap.dedent(text).lstrip("\n") + "\n", overrides, partial=True)


def mistakes_in(text: str, *overrides: str) -> list[ConfigMistake]:
    """Return what is wrong with ``text``, which may lack what an experiment needs."""
    with pytest.raises(ConfigError) as caught:
        read_part(text, *overrides)
    return list(caught.value.mistakes)
