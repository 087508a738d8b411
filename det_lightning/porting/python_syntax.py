"""A Python file as libcst sees it, with the changes to be made to its text."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import libcst as cst
from libcst import metadata

from det_lightning.porting.edits import Edits
from det_lightning.porting.findings import Finding, Severity

_FORM_FEEDS = re.compile(r"^\f", re.MULTILINE)
# Trials of other frameworks, which train otherwise.
_OTHER_TRIALS = {"DeepSpeedTrial", "EstimatorTrial", "TFKerasTrial"}


class PythonFile:
    """Syntax, scopes and positions of a file.

    Args:
        text: the content of the file, without a byte order mark.

    Attributes:
        edits: what is changed.
        findings: what is left to the user.

    Raises:
        libcst.ParserSyntaxError: it is not Python 3.
    """

    def __init__(self, text: str) -> None:
        wrapper = metadata.MetadataWrapper(cst.parse_module(_FORM_FEEDS.sub("", text)), unsafe_skip_copy=True)
        providers = (metadata.PositionProvider, metadata.ParentNodeProvider)
        found: Mapping[Any, Mapping[cst.CSTNode, Any]] = wrapper.resolve_many(providers)
        self._wrapper = wrapper
        self.module = wrapper.module
        self.edits = Edits(text)
        self.findings: list[Finding] = []
        self._positions, self._parents = (found[provider] for provider in providers)

    @functools.cached_property
    def _scopes(self) -> Mapping[cst.CSTNode, Any]:
        """Scopes, which take the longest to find, and only files with imports of Determined need."""
        return self._wrapper.resolve(metadata.ScopeProvider)

    def visit(self, visitor: cst.CSTVisitor) -> None:
        """Walk through the whole file."""
        self.module.visit(visitor)

    def line(self, node: cst.CSTNode) -> int:
        """Return the line that a node begins in, from 1."""
        line: int = self._positions[node].start.line
        return line

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return where a node begins and ends in the text."""
        position = self._positions[node]
        start = self.edits.offset(position.start.line, position.start.column)
        return start, self.edits.offset(position.end.line, position.end.column)

    def source(self, node: cst.CSTNode) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.edits.text[start:end]

    def replace(self, node: cst.CSTNode, new: str) -> None:
        """Replace the text of a node."""
        self.edits.replace(*self.span(node), new)

    def remove_lines(self, node: cst.CSTNode) -> None:
        """Remove the lines that a node stands in, and one of two empty lines that would then follow one another."""
        position = self._positions[node]
        start = self.edits.offset(position.start.line, 0)
        end = self.edits.offset(position.end.line + 1, 0)
        after = self.edits.offset(position.end.line + 2, 0)
        around = self.edits.offset(position.start.line - 1, 0) if position.start.line > 1 else start
        is_between = around < start and not (self.edits.text[around:start] + self.edits.text[end:after]).strip()
        self.edits.replace(start, after if is_between and end < after else end, "")

    def note(self, node: cst.CSTNode, severity: Severity, reason: str, advice: str) -> None:
        """Record a finding in the line that a node begins in."""
        self.findings.append(Finding(self.line(node), severity, reason, advice))

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the node that a node is a part of."""
        return self._parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes that a node is a part of, the nearest first."""
        current = self.parent(node)
        while current is not None:
            yield current
            current = self.parent(current)

    def assignments(self, name: cst.Name) -> list[cst.CSTNode | None]:
        """Return the nodes that may have given a name its value where it stands; None is a builtin."""
        scope = self._scopes.get(name)
        if scope is None:
            return []
        return [getattr(assignment, "node", None) for assignment in scope[name.value]]

    def chain(self, name: cst.Name) -> list[cst.Attribute]:
        """Return the attributes that are taken of a name: for ``a`` in ``a.b.c`` those of ``b`` and ``c``."""
        found: list[cst.Attribute] = []
        node: cst.CSTNode = name
        while isinstance(parent := self.parent(node), cst.Attribute) and parent.value is node:
            found.append(parent)
            node = parent
        return found


def dotted_name(node: cst.CSTNode | None) -> str:
    """Return ``a.b.c`` for names and their attributes, and the empty string for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        base = dotted_name(node.value)
        return f"{base}.{node.attr.value}" if base else ""
    return ""


def string_of(node: cst.CSTNode) -> str | None:
    """Return the value of a string that stands in the source as it is: without escapes, bytes or f-strings."""
    if not isinstance(node, cst.SimpleString) or set(node.prefix.lower()) - {"r", "u"}:
        return None
    raw = node.raw_value
    return raw if isinstance(raw, str) and "\\" not in raw else None


class Definitions(cst.CSTVisitor):
    """Finds classes that derive from ``PyTorchTrial`` and ``PyTorchCallback``, also through others of the file.

    What derives from ``SomethingTrial`` of another module and defines ``train_batch`` is a trial too.

    Args:
        file: the file.

    Attributes:
        trials: the trials.
        callbacks: the callbacks.
    """

    def __init__(self, file: PythonFile) -> None:
        super().__init__()
        self._kinds = {"PyTorchTrial": "trial", "PyTorchCallback": "callback"}
        self.trials: list[cst.ClassDef] = []
        self.callbacks: list[cst.ClassDef] = []
        file.visit(self)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802 (a method of libcst's)
        bases = [dotted_name(base.value).rpartition(".")[2] for base in node.bases]
        kind = next((self._kinds[base] for base in bases if base in self._kinds), None)
        if kind is None and any(base.endswith("Trial") and base not in _OTHER_TRIALS for base in bases):
            kind = "trial" if any(method.name.value == "train_batch" for method in methods_of(node)) else None
        if kind is not None:
            self._kinds[node.name.value] = kind
            found = self.trials if kind == "trial" else self.callbacks
            found.append(node)


def methods_of(definition: cst.ClassDef) -> Iterator[cst.FunctionDef]:
    """Yield the methods that stand in the body of a class."""
    for statement in definition.body.body:
        if isinstance(statement, cst.FunctionDef):
            yield statement
