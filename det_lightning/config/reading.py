"""Reading a file into the typed configuration, reporting all mistakes at once."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from det_lightning.arguments import suggest
from det_lightning.config.document import Document, KeyPath, leaf_paths
from det_lightning.config.effects import FIELD_RULES
from det_lightning.config.experiment import ExperimentConfig
from det_lightning.config.length import UNITS
from det_lightning.config.older_releases import rewrite_older_spellings
from det_lightning.config.rules import broken_rules
from det_lightning.config.searchers import change_search
from det_lightning.config.section import UNKNOWN_KEY, show_value
from det_lightning.config.yaml_reader import MOST_CHARACTERS, YamlDocument
from det_lightning.errors import ConfigError, ConfigMistake
from det_lightning.files.file_kinds import require_file
from det_lightning.masking import is_masked

# The user's own sections: null is a value there, and epochs an ordinary name.
_FREE = ("hyperparameters", "data")
# A mapping here abbreviates a list with a single element.
_LISTS = {("bind_mounts",)}


def with_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a configuration with some values replaced; ``data`` stays unchanged.

    Each override is ``a.b=v``, with ``v`` in YAML. ``x,y`` is a list of two. A mapping is merged with the old mapping,
    unless the mapping is a length; null removes the old value. Raises a ConfigError with all mistakes.
    """
    merged = dict(data)
    for path, value in read_overrides(overrides):
        for key in reversed(path):
            value = {key: value}
        merged = _merge(merged, value, is_free=path[0] in _FREE)
    return merged


def read_overrides(overrides: Sequence[str]) -> list[tuple[KeyPath, Any]]:
    """Return the path and value of each override; raise a ConfigError with all mistakes."""
    mistakes: list[ConfigMistake] = []
    found: list[tuple[KeyPath, Any]] = []
    for override in overrides:
        name, sign, text = override.partition("=")
        path = tuple(name.strip().split("."))
        if not sign or "" in path:
            message = f"must be name=value, with dots in name; got {show_value(override)}"
            mistakes.append(ConfigMistake(None, "", message))
            continue
        value = _value(text, name, mistakes)
        found.append((path, [value] if path in _LISTS and not isinstance(value, list) else value))
    if mistakes:
        raise ConfigError("--config", mistakes)
    return found


def _value(text: str, name: str, mistakes: list[ConfigMistake]) -> Any:
    if "," in text and not text.startswith(("[", "{")):
        return [_value(part, name, mistakes) for part in text.split(",")]
    document = YamlDocument(text)
    mistakes.extend(ConfigMistake(None, name, mistake.message) for mistake in document.mistakes)
    for path in document.without_value:
        if path:  # the whole value may be empty
            advice = "write a space after the colon" if ":" in str(path[-1]) else "set a value, or null"
            mistakes.append(ConfigMistake(None, name, f"the key {show_value(path[-1])} has no value: {advice}"))
    return document.data


def _merge(old: Mapping[str, Any], new: Mapping[str, Any], *, is_free: bool) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        if value is None and not is_free:
            merged.pop(key, None)
            continue
        # Another unit replaces the old one.
        is_length = not is_free and isinstance(value, Mapping) and bool(value) and value.keys() <= set(UNITS)
        if isinstance(before, Mapping) and isinstance(value, Mapping) and not is_length:
            value = _merge(before, value, is_free=is_free)
        merged[key] = value
    return merged


# Keys of several sections: one there is no sign that another section was meant.
_OF_ANY = ("name", "type")

Source = str | os.PathLike[str] | Mapping[str, Any]


def read_config(source: Source, overrides: Sequence[str] = (), *, partial: bool = False) -> ExperimentConfig:
    """Read an experiment configuration of any release from 0.12 to 0.38.

    Args:
        source: a file; its text, as a string with a line break; or its content, as a dict.
        overrides: new values for the configuration, each written like ``searcher.max_trials=4``.
        partial: allow the configuration to lack entrypoint, searcher and metric, needed by experiments only.

    Raises:
        ConfigError: the configuration is unreadable or unusable; the message lists all mistakes with line numbers.
    """
    document = Document(copy.deepcopy(dict(source))) if isinstance(source, Mapping) else _open(source)
    return _build(document, overrides, partial=partial)


@dataclasses.dataclass(frozen=True)
class GivenConfig:
    """A configuration given to a call."""

    #: The values; ``model_fields_set`` of a section has the given fields only.
    typed: ExperimentConfig
    #: The trial's view: a dict as given, a file with all defaults.
    plain: dict[str, Any] = dataclasses.field(repr=False)
    #: The section as given, perhaps with masked secrets.
    checkpoint_storage: dict[str, Any] | None = dataclasses.field(repr=False)


def read_given(source: Source) -> GivenConfig:
    """Read a configuration given to a call: a file, or a dict with any keys, also unknown ones.

    Raises:
        ConfigError: Determined's master would refuse a value; the message lists all mistakes.
    """
    document = Document(_plain(source)) if isinstance(source, Mapping) else _open(source)
    section = _take_storage(document.data)
    typed = _build(document, partial=True, forgiving=True)
    if isinstance(source, Mapping):
        return GivenConfig(typed, source if isinstance(source, dict) else dict(source), section)
    plain = typed.as_dict()
    if "experiment_seed" not in typed.reproducibility.model_fields_set:
        # The default is the time, different in each process of a run.
        plain["reproducibility"]["experiment_seed"] = 0
    plain["checkpoint_storage"].update(section or {})
    return GivenConfig(typed, plain, section)


def _plain(value: Any) -> Any:
    """Copy mappings and sequences but not the values in them, which may be large or impossible to copy."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _take_storage(data: Any) -> dict[str, Any] | None:
    """Return the ``checkpoint_storage`` section, and drop masked values from the data."""
    section = data.get("checkpoint_storage") if isinstance(data, dict) else None
    if not isinstance(section, dict):
        return None
    data["checkpoint_storage"] = {name: value for name, value in section.items() if not is_masked(value)}
    return section


def _open(source: str | os.PathLike[str]) -> Document:
    is_text = isinstance(source, str) and "\n" in source
    document = YamlDocument(str(source)) if is_text else YamlDocument(_text(Path(source)), os.fspath(source))
    if document.data is None and document.mistakes:
        if not is_text and Path(source).suffix not in (".yaml", ".yml", ".json"):
            document.mistakes.append(ConfigMistake(None, "", "name an experiment configuration, a file in YAML"))
        raise ConfigError(document.name, document.mistakes)
    return document


def _text(path: Path) -> str:
    try:
        require_file(path)
        with path.open(encoding="utf-8-sig") as file:
            return file.read(MOST_CHARACTERS + 1)
    except OSError as e:
        folder = path if path.is_dir() else path.parent
        hint = suggest(path.name, [file.name for file in folder.glob("*.y*ml")]).replace("known are", "there are")
        raise ConfigError(str(path), [ConfigMistake(None, "", f"cannot be read: {e.strerror or e}{hint}")]) from e
    except UnicodeDecodeError as e:
        raise ConfigError(str(path), [ConfigMistake(None, "", f"is not UTF-8: {e}")]) from e


def _build(
    document: Document, overrides: Sequence[str] = (), *, partial: bool, forgiving: bool = False
) -> ExperimentConfig:
    """Return the configuration in a document; the document is modified."""
    if document.data is None and overrides:
        document.data = {}
    if not isinstance(document.data, dict):
        message = f"must be a mapping, with entrypoint, searcher and the like; got {show_value(document.data)}"
        raise ConfigError(document.name, [*document.mistakes, ConfigMistake(None, "", message)])
    before = document.data.get("searcher")
    document.data = with_overrides(document.data, overrides)
    given = [leaf for path, value in read_overrides(overrides) for leaf in leaf_paths(value, path)]
    document.lines.update(dict.fromkeys(given))
    rewrite_older_spellings(document)
    searcher = document.data.get("searcher")
    if ("searcher", "name") in given and isinstance(before, dict) and isinstance(searcher, dict):
        change_search(searcher, [str(path[1]) for path in given if path[0] == "searcher" and len(path) > 1])
    if partial and isinstance(document.data.get("searcher"), dict):
        document.data["searcher"].setdefault("name", "single")
    config = _validate(document, partial=partial, forgiving=forgiving)
    if document.mistakes:
        raise ConfigError(document.name, sorted(set(document.mistakes), key=ConfigMistake.position))
    return config


def _explain(error: Any, hyperparameters: Any) -> str:
    """Return the message of a mistake; for an unknown key that belongs elsewhere it says where."""
    path = error["loc"]
    if error["type"] != UNKNOWN_KEY:
        return str(error["msg"])
    fields = [tuple(rule.field.split(".")) for rule in FIELD_RULES]
    found = [field for field in fields if field[-1] == path[-1] not in _OF_ANY and field[:-1] != path[:-1]]
    meant = [".".join(field) if len(field) > 1 else f"{field[0]} at the top level" for field in found]
    if isinstance(hyperparameters, dict) and path[-1] in hyperparameters:
        meant.append(f"hyperparameters.{path[-1]}")
    if meant:
        return f"unknown key here; did you mean {' or '.join(meant)}?"
    is_bare = len(path) == 1 and error["msg"] == "unknown key"
    return f"{error['msg']}{'; a hyperparameter belongs below hyperparameters' if is_bare else ''}"


def _validate(document: Document, *, partial: bool, forgiving: bool) -> ExperimentConfig:
    """Return the configuration without unreadable sections, and add the mistakes to the document."""
    context = {"document": document, "forgiving": forgiving}
    unreadable: set[str] = set()
    try:
        config = ExperimentConfig.model_validate(document.data, context=context)
    except ValidationError as e:
        found = e.errors(include_url=False)
        unknown = [error for error in found if forgiving and error["type"] == UNKNOWN_KEY]
        if unknown:
            for error in unknown:
                del document.find_parent(error["loc"])[error["loc"][-1]]
                document.unknown.append(document.lines.mistake(error["loc"], error["msg"]))
            return _validate(document, partial=partial, forgiving=forgiving)
        # Unreadable values are null by now, and already reported.
        reported = {mistake.path for mistake in document.mistakes}
        mistakes = [
            document.lines.mistake(error["loc"], _explain(error, document.data.get("hyperparameters")))
            for error in found
        ]
        document.mistakes += [mistake for mistake in mistakes if mistake.path not in reported]
        unreadable = {str(error["loc"][0]) for error in found}
        readable = {name: value for name, value in document.data.items() if name not in unreadable}
        config = ExperimentConfig.model_validate(readable, context=context)
    broken = broken_rules(config, unreadable, partial=partial, forgiving=forgiving)
    document.mistakes += [document.lines.mistake(path, message) for path, message in broken]
    return config
