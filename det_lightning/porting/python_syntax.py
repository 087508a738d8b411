"""A Python file as parsed by libcst, with the pending changes to its text."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import libcst as cst
from libcst import metadata

from det_lightning.porting.edits import Edits
from det_lightning.porting.findings import Finding, Premise, Severity

Statement = cst.BaseSmallStatement | cst.BaseCompoundStatement
_Node = TypeVar("_Node", bound=cst.CSTNode)
_Other = TypeVar("_Other", bound=cst.CSTNode)
_FORM_FEEDS = re.compile(r"^\f", re.MULTILINE)
# A line with nothing but a backslash; libcst loses such a line at the beginning of a statement.
_JOINED = re.compile(r"^[ \t]*\\\r?$", re.MULTILINE)
# The places in syntax for names other than variables.
_LABELS: dict[type, str] = {cst.Attribute: "attr", cst.Arg: "keyword", cst.Param: "name"}
# Trials of other frameworks, with another training loop.
_OTHER_TRIALS = {"DeepSpeedTrial", "EstimatorTrial", "TFKerasTrial"}


class _Walk(cst.CSTVisitor):
    """All nodes in the order of the text, so that the nodes of a subtree are adjacent."""

    def __init__(self, module: cst.Module) -> None:
        super().__init__()
        self.nodes: list[cst.CSTNode] = []
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self.ranges: dict[cst.CSTNode, tuple[int, int]] = {}
        self._open: list[tuple[cst.CSTNode, int]] = []
        module.visit(self)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self._open:
            self.parents[node] = self._open[-1][0]
        self._open.append((node, len(self.nodes)))
        self.nodes.append(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        _, first = self._open.pop()
        self.ranges[original_node] = (first, len(self.nodes))


def _parse(code: str) -> cst.Module:
    """Return the parsed code. Raises RecursionError for code nested so deeply that it would crash libcst."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example about escapes
            ast.parse(code)
    except (MemoryError, SyntaxError) as e:  # libcst explains other errors
        if isinstance(e, MemoryError) or "too many nested" in e.msg:
            raise RecursionError from e
    module = cst.parse_module(code)
    joined = _JOINED.search(code)
    if joined is not None and module.code != code:  # libcst's positions are wrong
        line = code.count("\n", 0, joined.start()) + 1
        message = "a statement begins with a backslash"
        raise cst.ParserSyntaxError(message, lines=code.splitlines(), raw_line=line, raw_column=0)
    return module


class PythonFile:
    """Syntax, scopes and positions of a file. Raises libcst.ParserSyntaxError for files other than Python 3."""

    def __init__(self, text: str) -> None:
        self._wrapper = metadata.MetadataWrapper(_parse(_FORM_FEEDS.sub("", text)), unsafe_skip_copy=True)
        self._positions = self._wrapper.resolve(metadata.PositionProvider)
        self.module = self._wrapper.module
        self._walk = _Walk(self.module)
        self.edits = Edits(text)
        self.findings: list[Finding] = []

    @functools.cached_property
    def _scopes(self) -> Mapping[cst.CSTNode, Any]:
        """The scopes, found on demand: that takes longest, and only files that import Determined need them."""
        return self._wrapper.resolve(metadata.ScopeProvider)

    @overload
    def find(self, kind: type[_Node], /, *, within: cst.CSTNode | None = None) -> list[_Node]: ...

    @overload
    def find(
        self, kind: type[_Node], other: type[_Other], /, *, within: cst.CSTNode | None = None
    ) -> list[_Node | _Other]: ...

    def find(self, *kinds: type[cst.CSTNode], within: cst.CSTNode | None = None) -> Sequence[cst.CSTNode]:
        """Return the nodes of one or two kinds in the file, or in a node and below, in the order of the text."""
        first, last = self._walk.ranges[within or self.module]
        return [node for node in self._walk.nodes[first:last] if isinstance(node, kinds)]

    def line(self, node: cst.CSTNode) -> int:
        return self._positions[node].start.line

    def end_line(self, node: cst.CSTNode) -> int:
        return self._positions[node].end.line

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        position = self._positions[node]
        start = self.edits.offset(position.start.line, position.start.column)
        return start, self.edits.offset(position.end.line, position.end.column)

    def find_end(self, parameter: cst.Param) -> int:
        """Return the end of a parameter in the text, before the comma."""
        annotation = None if parameter.annotation is None else parameter.annotation.annotation
        return self.span(parameter.default or annotation or parameter.name)[1]

    def source(self, node: cst.CSTNode) -> str:
        start, end = self.span(node)
        return self.edits.text[start:end]

    def replace(self, node: cst.CSTNode, new: str) -> None:
        self.edits.replace(*self.span(node), new)

    def remove_lines(self, node: cst.CSTNode) -> None:
        """Remove the lines of a node, and one of two adjacent empty lines left by the removal."""
        first = self.line(node)
        last = self.end_line(node)
        start = self.edits.offset(first, 0)
        end = self.edits.offset(last + 1, 0)
        after = self.edits.offset(last + 2, 0)
        around = self.edits.offset(first - 1, 0) if first > 1 else start
        is_between = around < start and not (self.edits.text[around:start] + self.edits.text[end:after]).strip()
        self.edits.replace(start, after if is_between and end < after else end, "")

    def note(
        self, node: cst.CSTNode, severity: Severity, reason: str, advice: str, premise: Premise = Premise.nothing
    ) -> None:
        self.findings.append(Finding(self.line(node), severity, reason, advice, premise=premise))

    def parent(self, node: cst.CSTNode | None) -> cst.CSTNode | None:
        return None if node is None else self._walk.parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around a node, innermost first."""
        current = self.parent(node)
        while current is not None:
            yield current
            current = self.parent(current)

    def names(self, within: cst.CSTNode | None = None) -> list[cst.Name]:
        """Return the names of variables, without names of attributes, keyword arguments and parameters."""
        found = [(name, self.parent(name)) for name in self.find(cst.Name, within=within)]
        return [name for name, outer in found if getattr(outer, _LABELS.get(type(outer), ""), None) is not name]

    def assignments(self, name: cst.Name) -> list[cst.CSTNode | None]:
        """Return the nodes that may have given a name its value; None stands for a builtin."""
        scope = self._scopes.get(name)
        return [] if scope is None else [getattr(found, "node", None) for found in scope[name.value]]

    def find_values(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Return an expression itself, or the values assigned to a variable."""
        if not isinstance(node, cst.Name):
            return [node]
        targets = [target for target in self.assignments(node) if target is not None]
        around = [outer for target in targets for outer in itertools.islice(self.ancestors(target), 1, 2)]
        return [assign.value for assign in around if isinstance(assign, cst.Assign)]

    def is_annotation(self, node: cst.CSTNode) -> bool:
        """Return whether a node is a type: in an annotation, or an argument of ``cast`` or ``TypeVar``."""
        inner: cst.CSTNode = node
        for outer in self.ancestors(node):
            if isinstance(outer, cst.Annotation):
                return True
            if isinstance(outer, cst.Subscript):
                kind = last_name(outer.value)
                if kind == "Literal" or (kind == "Annotated" and inner is not outer.slice[0]):
                    return False
            if isinstance(outer, cst.Call):
                name = last_name(outer.func)
                is_bound = isinstance(inner, cst.Arg) and is_keyword(inner, "bound")
                return (name == "cast" and inner is outer.args[0]) or (name == "TypeVar" and is_bound)
            inner = outer
        return False


def dotted_name(node: cst.CSTNode | None) -> str:
    """Return ``a.b.c`` for names and attributes of names, and the empty string for other nodes."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and (base := dotted_name(node.value)):
        return f"{base}.{node.attr.value}"
    return ""


def last_name(node: cst.CSTNode | None) -> str:
    """Return ``c`` for ``a.b.c``, and the empty string for nodes other than names and attributes of names."""
    return dotted_name(node).rpartition(".")[2]


def called_method(node: cst.CSTNode | None) -> str:
    """Return ``c`` for a call ``<anything>.c(...)``, and the empty string for other nodes."""
    called = node.func if isinstance(node, cst.Call) else None
    return called.attr.value if isinstance(called, cst.Attribute) else ""


def read_string(node: cst.CSTNode) -> str | None:
    """Return the value of a string without escapes, or None for bytes, f-strings and other nodes."""
    if not isinstance(node, cst.SimpleString) or set(node.prefix.lower()) - {"r", "u"}:
        return None
    raw = node.raw_value
    return raw if isinstance(raw, str) and "\\" not in raw else None


def is_keyword(argument: cst.Arg, name: str) -> bool:
    """Return whether an argument is passed as ``name=...``."""
    return argument.keyword is not None and argument.keyword.value == name


def list_targets(statement: cst.Assign | cst.AnnAssign) -> list[cst.BaseExpression]:
    """Return the targets of an assignment."""
    return [statement.target] if isinstance(statement, cst.AnnAssign) else [given.target for given in statement.targets]


def list_parameters(function: cst.FunctionDef) -> list[cst.Param]:
    """Return the parameters with a position."""
    return [*function.params.posonly_params, *function.params.params]


def parameter_names(function: cst.FunctionDef) -> list[str]:
    """Return the names of :func:`list_parameters`."""
    return [parameter.name.value for parameter in list_parameters(function)]


def base_names(definition: cst.ClassDef) -> list[str]:
    """Return the last names of the base classes of a class."""
    return [last_name(base.value) for base in definition.bases]


def list_methods(definition: cst.ClassDef) -> list[cst.FunctionDef]:
    """Return the methods defined in the body of a class."""
    return [statement for statement in definition.body.body if isinstance(statement, cst.FunctionDef)]


def find_lineage(definition: cst.ClassDef, classes: list[cst.ClassDef]) -> list[cst.ClassDef]:
    """Return a class, and its direct and indirect bases among ``classes``."""
    found = [definition]
    for one in found:  # grows
        found += [base for base in classes if base.name.value in base_names(one) and base not in found]
    return found


def find_classes(file: PythonFile) -> dict[str, list[cst.ClassDef]]:
    """Return the trials and callbacks of a file, including classes derived from others in the file.

    A class derived from ``SomethingTrial`` of another module is a trial too if the class defines ``train_batch``.
    """
    kinds = {"PyTorchTrial": "trial", "PyTorchCallback": "callback"}
    found: dict[str, list[cst.ClassDef]] = {"trial": [], "callback": []}
    for node in file.find(cst.ClassDef):
        bases = base_names(node)
        is_derived = any(base.endswith("Trial") and base not in _OTHER_TRIALS for base in bases)
        is_trial = is_derived and any(method.name.value == "train_batch" for method in list_methods(node))
        kind = next((kinds[base] for base in bases if base in kinds), "trial" if is_trial else None)
        if kind is not None:
            kinds[node.name.value] = kind
            found[kind].append(node)
    return found


def rename_in_code(code: str, renamed: Callable[[str], str | None]) -> str:
    """Replace the dotted names in code, such as a quoted annotation, by what ``renamed`` returns."""
    try:
        file = PythonFile(code)
    except cst.ParserSyntaxError:
        return code
    for node in file.find(cst.Name, cst.Attribute):
        name = "" if isinstance(file.parent(node), cst.Attribute) else dotted_name(node)
        new = renamed(name) if name else None
        if new is not None:
            file.replace(node, new)
    return file.edits.result()
