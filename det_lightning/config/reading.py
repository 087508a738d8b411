"""From a file to the typed configuration, all mistakes at once."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from det_lightning.config.experiment import ExperimentConfig
from det_lightning.config.key_paths import SourceLines, leaf_paths
from det_lightning.config.older_releases import OlderSpellings
from det_lightning.config.overrides import read_overrides, with_overrides
from det_lightning.config.rules import broken_rules
from det_lightning.config.section import shown
from det_lightning.config.yaml_reader import YamlDocument
from det_lightning.errors import ConfigError, ConfigMistake


def read_config(
    source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = (), *, partial: bool = False
) -> ExperimentConfig:
    """Read an experiment configuration of any release from 0.12 to 0.38.

    Args:
        source: a file; its text, if it is a string with a line break; or what a file holds, as a dict.
        overrides: values that go before those of the source, each as ``searcher.max_trials=4``.
        partial: the configuration may lack what only an experiment needs: entrypoint, searcher and metric.

    Raises:
        ConfigError: the configuration cannot be read or used; all mistakes are named, with their lines.
    """
    if isinstance(source, Mapping):
        return _Reader("the configuration", copy.deepcopy(dict(source)), SourceLines()).read(overrides, partial=partial)
    if isinstance(source, str) and "\n" in source:
        name = "the configuration"
        text = source
    else:
        name = os.fspath(source)
        text = _text(Path(source))
    document = YamlDocument(text)
    if document.data is None and document.mistakes:
        raise ConfigError(name, document.mistakes)
    reader = _Reader(name, document.data, document.lines)
    reader.mistakes += document.mistakes
    reader.notes += document.notes
    return reader.read(overrides, partial=partial)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as e:
        raise ConfigError(str(path), [ConfigMistake(None, "", f"cannot be read: {e.strerror or e}")]) from e
    except UnicodeDecodeError as e:
        raise ConfigError(str(path), [ConfigMistake(None, "", f"is not UTF-8: {e}")]) from e


class _Reader:
    """One reading of a configuration, and what is found on the way.

    Args:
        name: what is read, for messages.
        data: what it holds; it is changed.
        lines: where the keys are.
    """

    def __init__(self, name: str, data: Any, lines: SourceLines) -> None:
        self._name = name
        self._data = data
        self._lines = lines
        self.mistakes: list[ConfigMistake] = []
        self.notes: list[ConfigMistake] = []

    def read(self, overrides: Sequence[str], *, partial: bool) -> ExperimentConfig:
        """Return the configuration, or raise everything that is wrong with it."""
        data = {} if self._data is None and overrides else self._data
        if not isinstance(data, dict):
            message = f"must be a mapping, with entrypoint, searcher and the like; got {shown(data)}"
            raise ConfigError(self._name, [*self.mistakes, ConfigMistake(None, "", message)])
        data = with_overrides(data, overrides)
        for path, value in read_overrides(overrides):
            for leaf in leaf_paths(value, path):
                self._lines.set(leaf, None)
        older = OlderSpellings(data, self._lines)
        self.mistakes += older.mistakes
        self.notes += older.notes
        if partial and isinstance(data.get("searcher"), dict):
            data["searcher"].setdefault("name", "single")
        config = self._validated(data, partial=partial)
        if self.mistakes:
            raise ConfigError(self._name, sorted(set(self.mistakes), key=ConfigMistake.position))
        return config

    def _validated(self, data: dict[str, Any], *, partial: bool) -> ExperimentConfig:
        context = {"lines": self._lines, "notes": self.notes}
        unreadable: set[str] = set()
        try:
            config = ExperimentConfig.model_validate(data, context=context)
        except ValidationError as e:
            found = e.errors(include_url=False)
            # What the text itself could not hold is null by now.
            reported = {mistake.path for mistake in self.mistakes}
            mistakes = [self._lines.mistake(error["loc"], error["msg"]) for error in found]
            self.mistakes += [mistake for mistake in mistakes if mistake.path not in reported]
            unreadable = {str(error["loc"][0]) for error in found}
            readable = {name: value for name, value in data.items() if name not in unreadable}
            config = ExperimentConfig.model_validate(readable)
        broken = broken_rules(config, unreadable, partial=partial)
        self.mistakes += [self._lines.mistake(path, message) for path, message in broken]
        return config
