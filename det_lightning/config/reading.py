"""Reading a file into the typed configuration, reporting all mistakes at once."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from det_lightning.config.experiment import ExperimentConfig
from det_lightning.config.key_paths import KeyPath, SourceLines, leaf_paths
from det_lightning.config.older_releases import OlderSpellings
from det_lightning.config.overrides import read_overrides, with_overrides
from det_lightning.config.rules import broken_rules
from det_lightning.config.section import UNKNOWN_KEY, shown
from det_lightning.config.yaml_reader import MOST_CHARACTERS, YamlDocument
from det_lightning.errors import ConfigError, ConfigMistake
from det_lightning.masking import is_masked

Source = str | os.PathLike[str] | Mapping[str, Any]


def read_config(source: Source, overrides: Sequence[str] = (), *, partial: bool = False) -> ExperimentConfig:
    """Read an experiment configuration of any release from 0.12 to 0.38.

    Args:
        source: a file; its text, as a string with a line break; or its content, as a dict.
        overrides: values that override those of the source, each written like ``searcher.max_trials=4``.
        partial: the configuration may lack what only an experiment needs: entrypoint, searcher and metric.

    Raises:
        ConfigError: the configuration cannot be read or used; the message lists all mistakes with their lines.
    """
    return _reader_of(source).read(overrides, partial=partial)


@dataclasses.dataclass(frozen=True)
class GivenConfig:
    """The configuration that a call was given."""

    #: Its values; fields that it does not set are not among the ``model_fields_set`` of a section.
    typed: ExperimentConfig
    #: What the trial sees: a dict as it was given, a file with all defaults.
    plain: dict[str, Any] = dataclasses.field(repr=False)
    #: This section as it was given; its secrets may be masked.
    checkpoint_storage: dict[str, Any] | None = dataclasses.field(repr=False)


def read_given(source: Source) -> GivenConfig:
    """Read the configuration that a call was given: a file, or a dict that may have only some keys, also unknown ones.

    Raises:
        ConfigError: Determined's master would refuse what is there; the message lists all mistakes.
    """
    reader = _reader_of(_plain(source) if isinstance(source, Mapping) else source)
    section = reader.take_storage()
    typed = reader.read((), partial=True, forgiving=True)
    if isinstance(source, Mapping):
        return GivenConfig(typed, source if isinstance(source, dict) else dict(source), section)
    plain = typed.as_dict()
    if "experiment_seed" not in typed.reproducibility.model_fields_set:
        # The default is the time, which differs between the processes of a run.
        plain["reproducibility"]["experiment_seed"] = 0
    plain["checkpoint_storage"].update(section or {})
    return GivenConfig(typed, plain, section)


def _plain(value: Any) -> Any:
    """Copy mappings and sequences, but not the values in them, which may be large or impossible to copy."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _reader_of(source: Source) -> _Reader:
    if isinstance(source, Mapping):
        return _Reader("the configuration", copy.deepcopy(dict(source)), SourceLines(), [], [])
    if isinstance(source, str) and "\n" in source:
        name = "the configuration"
        text = source
    else:
        name = os.fspath(source)
        text = _text(Path(source))
    document = YamlDocument(text)
    if document.data is None and document.mistakes:
        raise ConfigError(name, document.mistakes)
    return _Reader(name, document.data, document.lines, document.mistakes, document.notes)


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.read(MOST_CHARACTERS + 1)
    except OSError as e:
        raise ConfigError(str(path), [ConfigMistake(None, "", f"cannot be read: {e.strerror or e}")]) from e
    except UnicodeDecodeError as e:
        raise ConfigError(str(path), [ConfigMistake(None, "", f"is not UTF-8: {e}")]) from e


class _Reader:
    """Reads one configuration, which it modifies, and collects what it finds on the way."""

    def __init__(
        self, name: str, data: Any, lines: SourceLines, mistakes: list[ConfigMistake], notes: list[ConfigMistake]
    ) -> None:
        self._name = name
        self._data = data
        self._lines = lines
        self._mistakes = mistakes
        self._notes = notes
        self._unknown: list[ConfigMistake] = []

    def take_storage(self) -> dict[str, Any] | None:
        """Return the ``checkpoint_storage`` section, and drop its masked values before going on."""
        section = self._data.get("checkpoint_storage") if isinstance(self._data, dict) else None
        if not isinstance(section, dict):
            return None
        self._data["checkpoint_storage"] = {name: value for name, value in section.items() if not is_masked(value)}
        return section

    def read(self, overrides: Sequence[str], *, partial: bool, forgiving: bool = False) -> ExperimentConfig:
        data = {} if self._data is None and overrides else self._data
        if not isinstance(data, dict):
            message = f"must be a mapping, with entrypoint, searcher and the like; got {shown(data)}"
            raise ConfigError(self._name, [*self._mistakes, ConfigMistake(None, "", message)])
        data = with_overrides(data, overrides)
        for path, value in read_overrides(overrides):
            for leaf in leaf_paths(value, path):
                self._lines.set(leaf, None)
        older = OlderSpellings(data, self._lines)
        self._mistakes += older.mistakes
        self._notes += older.notes
        if partial and isinstance(data.get("searcher"), dict):
            data["searcher"].setdefault("name", "single")
        config = self._validated(data, partial=partial, forgiving=forgiving)
        if self._mistakes:
            raise ConfigError(self._name, sorted(set(self._mistakes), key=ConfigMistake.position))
        return config

    def _validated(self, data: dict[str, Any], *, partial: bool, forgiving: bool) -> ExperimentConfig:
        context = {"lines": self._lines, "notes": self._notes, "unknown": self._unknown, "forgiving": forgiving}
        unreadable: set[str] = set()
        try:
            config = ExperimentConfig.model_validate(data, context=context)
        except ValidationError as e:
            found = e.errors(include_url=False)
            unknown = [error for error in found if forgiving and error["type"] == UNKNOWN_KEY]
            if unknown:
                for error in unknown:
                    self._leave_out(data, error["loc"], error["msg"])
                return self._validated(data, partial=partial, forgiving=forgiving)
            # Values that could not be read from the text are null by now, and already reported.
            reported = {mistake.path for mistake in self._mistakes}
            mistakes = [self._lines.mistake(error["loc"], error["msg"]) for error in found]
            self._mistakes += [mistake for mistake in mistakes if mistake.path not in reported]
            unreadable = {str(error["loc"][0]) for error in found}
            readable = {name: value for name, value in data.items() if name not in unreadable}
            config = ExperimentConfig.model_validate(readable, context=context)
        broken = broken_rules(config, unreadable, partial=partial, forgiving=forgiving)
        self._mistakes += [self._lines.mistake(path, message) for path, message in broken]
        return config

    def _leave_out(self, data: Any, path: KeyPath, message: str) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]
        self._unknown.append(self._lines.mistake(path, message))
