"""Reads YAML as Determined does, and JSON as YAML, with the line of every key, and reports all mistakes at once.

Determined's command line read YAML 1.2 and refused duplicate keys. Determined's master had the last word on values, and
also accepted the booleans of YAML 1.1 (``yes``, ``off``). Dates were text, only values known to JSON got through, and
``64.0`` became ``64``.
"""

from __future__ import annotations

import math
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from det_lightning.config.document import Document, KeyPath, path_text
from det_lightning.errors import ConfigMistake
from det_lightning.hyperparameters import convert_like_master
from det_lightning.masking import CREDENTIALS, MASK, is_secret, mask_text

#: Longer texts are not read at all.
MOST_CHARACTERS = 1024 * 1024

_TAG = "tag:yaml.org,2002:"
_TEXT = {f"{_TAG}str", f"{_TAG}timestamp"}
_NUMBERS = {f"{_TAG}int", f"{_TAG}float"}
_CONSTANTS = {f"{_TAG}bool", f"{_TAG}null"}
_BOOLEANS_OF_YAML_1_1 = {
    **{f(word): True for word in ("y", "yes", "on") for f in (str.lower, str.upper, str.capitalize)},
    **{f(word): False for word in ("n", "no", "off") for f in (str.lower, str.upper, str.capitalize)},
}
# For lines of a text that has no structure.
_SECRET = re.compile(rf"(?:{'|'.join(sorted(CREDENTIALS))}|password|auth|identitytoken|registrytoken)['\"]?\s*:|://.*@")
_LEADING_ZERO = re.compile(r"[-+]?0[0-7]+")
# Keys count, too. A parser needs long for as many as fit into a megabyte, and aliases of aliases can stand
# for any number of values.
_MOST_VALUES = 25_000


def _make_parser(composer: type[Composer] = Composer) -> YAML:
    """Return a parser for one text only, since directives in a text may change the parser's version of YAML."""
    parser = YAML(typ="safe", pure=True)
    parser.Composer = composer  # before the next line, which makes one
    parser.composer.warn_double_anchors = False  # YAML allows double anchors, and the warning would show the text
    return parser


def compose_documents(text: str) -> list[Node]:
    """Return the root node of each non-empty document in a text, or raise a YAMLError."""
    try:
        return [node for node in _make_parser().compose_all(text) if node is not None]
    except AssertionError as e:  # a %YAML directive with an unknown version
        raise YAMLError("a %YAML directive with an unknown version") from e


def explain_error(error: Exception, text: str) -> tuple[int | None, str]:
    """Return the line, if known, and the problem of a text that is not YAML, without secrets in the line."""
    mark = error.problem_mark or error.context_mark if isinstance(error, MarkedYAMLError) else None
    if not isinstance(error, MarkedYAMLError) or mark is None:
        return None, mask_text(" ".join(str(error).split()))
    problem = ": ".join(part for part in (error.context, error.problem) if part)
    if any(map(_SECRET.search, text.splitlines()[mark.line : mark.line + 1])):  # a part may look like a name
        problem = f"{problem.partition(chr(39))[0].strip()}: write the value in quotes"
    elif str(error.problem).startswith("found character '\\t'"):
        problem = "a tab, which YAML does not allow to indent with; indent with spaces"
    elif error.problem == "mapping values are not allowed here":
        problem += ": check the indentation, and the space after each colon"
    return mark.line + 1, problem


class YamlDocument(Document):
    """The content of a YAML document. The notes list values read differently than in YAML 1.2."""

    def __init__(self, text: str, name: str = "the configuration") -> None:
        super().__init__(None, name)
        self._open: list[Node] = []
        self._values = 0
        self.without_value: list[KeyPath] = []  # keys with nothing after the colon
        self._yaml = _make_parser(_BoundedComposer)
        if len(text) > MOST_CHARACTERS:
            self.mistakes.append(ConfigMistake(None, "", f"more than {MOST_CHARACTERS:,} characters"))
            return
        try:
            root = self._yaml.compose(text)
            if root is not None:
                self.lines[()] = root.start_mark.line + 1
                self.data = self._convert(root, ())
        except (YAMLError, AssertionError) as e:  # an AssertionError for a %YAML directive with an unknown version
            line, problem = explain_error(e, text)
            self.mistakes.append(ConfigMistake(line, "", f"not YAML: {problem}"))
        except (_TooLarge, RecursionError):
            message = f"more than {_MOST_VALUES:,} keys and values, or too many levels; keep data in a separate file"
            self.mistakes.append(ConfigMistake(None, "", message))

    def _convert(self, node: Node, path: KeyPath) -> Any:
        self._values += 1
        if self._values > _MOST_VALUES:
            raise _TooLarge
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if any(node is parent for parent in self._open):
            return self._wrong(node, path, "an alias must not stand for a value around it")
        self._open.append(node)
        try:
            if isinstance(node, MappingNode) and node.tag == f"{_TAG}map":
                return self._mapping(node, path)
            if isinstance(node, SequenceNode) and node.tag == f"{_TAG}seq":
                return self._sequence(node, path)
            return self._wrong(node, path, f"values of the type {_show_text(node.tag, path)} cannot be used")
        finally:
            self._open.pop()

    def _sequence(self, node: SequenceNode, path: KeyPath) -> list[Any]:
        items = []
        for i, item in enumerate(node.value):
            item_path = (*path, i)
            self.lines[item_path] = item.start_mark.line + 1
            items.append(self._convert(item, item_path))
        return items

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        sources = [
            source
            for key, value in node.value
            if key.tag == f"{_TAG}merge"
            for source in (value.value if isinstance(value, SequenceNode) else [value])
        ]
        merged: dict[str, Any] = {}
        for source in reversed(sources):
            entries = self._convert(source, path)
            if isinstance(entries, dict):
                merged.update(entries)
            else:
                self._wrong(source, path, "<< takes a mapping, or a list of mappings")
        own: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == f"{_TAG}merge":
                continue
            if not isinstance(key, ScalarNode) or key.tag == f"{_TAG}null":
                self._wrong(key, path, "a key must be a string")
                continue
            name = self._join_surrogates(key, path, key.value)
            entry_path = (*path, name)
            if name in own:
                self._wrong(key, entry_path, f"duplicate key; the first is in line {self.lines.find(entry_path)}")
                continue
            self.lines[entry_path] = key.start_mark.line + 1
            own[name] = self._convert(value, entry_path)
        return {**merged, **own}

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        text = str(node.value)
        if not text and node.style is None:
            self.without_value.append(path)
        if node.tag in _TEXT:
            if node.style is None and text in _BOOLEANS_OF_YAML_1_1:
                value = _BOOLEANS_OF_YAML_1_1[text]
                meant = "true" if value else "false"
                message = f"{text} is read as {meant}, as Determined did; write {meant}, or '{text}'"
                self.notes.append(ConfigMistake(node.start_mark.line + 1, path_text(path), message))
                return value
            return self._join_surrogates(node, path, text)
        if node.tag not in _NUMBERS | _CONSTANTS:
            return self._wrong(
                node, path, f"values of the type {_show_text(node.tag, path)} cannot be used; quote a text"
            )
        try:
            value = self._yaml.constructor.construct_object(node)
            if isinstance(value, int):
                float(value)
        except (ValueError, KeyError, IndexError, OverflowError):
            return self._wrong(node, path, f"not of the type {node.tag}, or too large")
        if node.tag == f"{_TAG}int" and _LEADING_ZERO.fullmatch(text) and value != int(text, 8):
            meanings = f"is {value} in YAML 1.2 and {int(text, 8)} before: write {value} or 0o{text.lstrip('+-0')}"
            if is_secret(path):
                meanings = "is another number before YAML 1.2: write it in quotes"
            return self._wrong(node, path, f"{_show_text(text, path)} {meanings}")
        if isinstance(value, float) and not math.isfinite(value):
            return self._wrong(node, path, f"must be a finite number; got {_show_text(text, path)}")
        return convert_like_master(value) if isinstance(value, float) else value

    def _join_surrogates(self, node: Node, path: KeyPath, text: str) -> str:
        """Return a text with the surrogate pairs from JSON's escapes joined to characters."""
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self._wrong(node, path, "an escape stands for half a character")
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _wrong(self, node: Node, path: KeyPath, message: str) -> None:
        self.mistakes.append(ConfigMistake(node.start_mark.line + 1, path_text(path), message))


def _show_text(text: str | None, path: KeyPath) -> str:
    """Return a text for a message about the value at a path, masked if it is a secret."""
    return MASK if is_secret(path) else f"{mask_text(str(text)):.100}"


class _TooLarge(Exception):
    pass


class _BoundedComposer(Composer):
    _composed = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._composed += 1
        if self._composed > _MOST_VALUES:
            raise _TooLarge
        return super().compose_node(parent, index)
